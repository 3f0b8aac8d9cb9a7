// What config.json beside an exported file says. sharing/segment/host.py writes it.

#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace recursive {

// Boards of one size.
struct Board {
  std::int64_t cells;
  std::int64_t vocabulary;  // kinds of tokens
};

struct Host {
  std::filesystem::path file;
  std::vector<std::string> inputs, outputs;  // their names, in the order of the file
  std::vector<std::string> states;           // the inputs that the segment hands on
  std::map<std::string, std::vector<std::vector<float>>> starts;
  std::vector<std::int64_t> state_shape;  // kCells and kSymbols stand for numbers of the board
  bool any_size;
  std::string noise;  // none, fresh or annealed
  std::int64_t segments;
  bool values_going_on;
  std::string symbols;  // empty where boards are no texts
  Board board;          // of the training

  static constexpr std::int64_t kCells = -1, kSymbols = -2;

  // Read and check config.json and the hash of the file, or throw a Mistake.
  static Host read(const std::filesystem::path& folder);

  bool has(const std::string& input) const;
  bool is_sudoku() const { return symbols.starts_with("?.1"); }

  // The sizes of boards that the model reads.
  std::vector<Board> boards() const;
};

// The first sentence of a message of a library, in characters that a terminal prints.
std::string one_line(const std::string& message);

}  // namespace recursive
