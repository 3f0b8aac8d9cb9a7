// SHA-256 (FIPS 180-4), to see that a file is the one that config.json describes.

#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <istream>
#include <string>

namespace recursive {

class Sha256 {
 public:
  // Return the hash of the rest of a stream, in hexadecimal digits.
  static std::string of(std::istream& stream) {
    Sha256 hash;
    std::array<char, 64> block{};
    std::uint64_t num_bytes = 0;
    for (;;) {
      stream.read(block.data(), block.size());
      const auto num = static_cast<std::size_t>(stream.gcount());
      num_bytes += num;
      if (num < block.size()) {
        hash.finish(block, num, 8 * num_bytes);
        return hash.digits();
      }
      hash.add(block);
    }
  }

 private:
  // The end is a bit 1, zeros, and the number of bits in 8 bytes.
  void finish(std::array<char, 64> block, std::size_t num, std::uint64_t num_bits) {
    block[num++] = static_cast<char>(0x80);
    if (num > 56) {
      std::fill(block.begin() + num, block.end(), 0);
      add(block);
      num = 0;
    }
    std::fill(block.begin() + num, block.end(), 0);
    for (int n = 0; n < 8; ++n) block[63 - n] = static_cast<char>(num_bits >> (8 * n));
    add(block);
  }

  void add(const std::array<char, 64>& block) {
    std::array<std::uint32_t, 64> w{};
    for (int n = 0; n < 64; ++n) w[n / 4] = w[n / 4] << 8 | static_cast<unsigned char>(block[n]);
    for (int t = 16; t < 64; ++t) {
      const auto s0 = std::rotr(w[t - 15], 7) ^ std::rotr(w[t - 15], 18) ^ w[t - 15] >> 3;
      const auto s1 = std::rotr(w[t - 2], 17) ^ std::rotr(w[t - 2], 19) ^ w[t - 2] >> 10;
      w[t] = w[t - 16] + s0 + w[t - 7] + s1;
    }
    auto [a, b, c, d, e, f, g, h] = state_;
    for (int t = 0; t < 64; ++t) {
      const auto s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
      const auto t1 = h + s1 + ((e & f) ^ (~e & g)) + kRound[t] + w[t];
      const auto s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
      const auto t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    const std::array<std::uint32_t, 8> sums{a, b, c, d, e, f, g, h};
    for (int n = 0; n < 8; ++n) state_[n] += sums[n];
  }

  std::string digits() const {
    std::string text;
    for (const auto word : state_) {
      for (int shift = 28; shift >= 0; shift -= 4) text += "0123456789abcdef"[word >> shift & 15];
    }
    return text;
  }

  // The fractions of the roots of primes: square roots here, cube roots below.
  std::array<std::uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  static constexpr std::array<std::uint32_t, 64> kRound{
      0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4,
      0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe,
      0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f,
      0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7,
      0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc,
      0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b,
      0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116,
      0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
      0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7,
      0xc67178f2,
  };
};

}  // namespace recursive
