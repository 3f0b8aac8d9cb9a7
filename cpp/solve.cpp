// Read puzzles from stdin, one a line, and print their answers, one a line.

#ifdef __linux__
#include <malloc.h>
#endif

#include <charconv>
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

#include "solver.h"

namespace {

constexpr const char* kHelp =
    "usage: solve FOLDER [--restarts N] [--seed N] [--all-segments] [--threads N] [--verbose]\n"
    "Reads puzzles from stdin, one a line, and prints their answers, one a line.\n"
    "  FOLDER          written by python -m sharing.export --format aoti or torchscript\n"
    "  --restarts N    up to N more passes for a puzzle whose answer has not settled\n"
    "  --seed N        of the noise that restarts read\n"
    "  --all-segments  go on after an answer has settled, as solve.py does\n"
    "  --threads N     threads of a segment (default: 1, which is fastest for small models)\n"
    "  --verbose       after each answer: confidence, segments, and settled or open\n"
    "The exit status is 2 after a mistake. Answers to the lines before it have been printed.\n";

std::uint32_t number(std::string_view name, std::string_view text, std::uint32_t most) {
  std::uint32_t found = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), found);
  if (text.empty() || error != std::errc() || end != text.data() + text.size() || found > most) {
    throw recursive::Mistake(std::string(name) + " needs a whole number from 0 to " +
                             std::to_string(most));
  }
  return found;
}

int solve(const std::vector<std::string_view>& arguments) {
  std::string folder;
  recursive::Options options;
  int threads = 1;
  bool verbose = false;
  for (std::size_t n = 0; n < arguments.size(); ++n) {
    const std::string_view name = arguments[n];
    const auto value = [&](std::uint32_t most) {
      const std::string_view text = n + 1 < arguments.size() ? arguments[++n] : "";
      return number(name, text, most);
    };
    if (name == "--help" || name == "-h") {
      std::cout << kHelp;
      return 0;
    } else if (name == "--restarts") {
      options.restarts = static_cast<int>(value(999'999));
    } else if (name == "--seed") {
      options.seed = value(UINT32_MAX);
    } else if (name == "--threads") {
      threads = static_cast<int>(value(1024));
    } else if (name == "--all-segments") {
      options.all_segments = true;
    } else if (name == "--verbose") {
      verbose = true;
    } else if (folder.empty() && !name.starts_with('-')) {
      folder = name;
    } else {
      throw recursive::Mistake("unknown argument " + std::string(name) + "; see solve --help");
    }
  }
  if (folder.empty()) throw recursive::Mistake("which model? See solve --help");
  if (threads == 0) throw recursive::Mistake("--threads is 0; give at least 1");
  recursive::Solver::use_threads(threads);
  const auto solver = recursive::Solver::load(folder);
  std::string line;
  for (std::size_t n = 1; std::getline(std::cin, line); ++n) {
    try {
      const recursive::Answer answer = solver.solve(solver.read(line), options);
      std::cout << solver.write(answer.tokens);
      if (verbose) {
        std::cout << '\t' << answer.confidence << '\t' << answer.segments << '\t'
                  << (answer.settled ? "settled" : "open");
      }
      std::cout << std::endl;
    } catch (const recursive::Mistake& mistake) {
      throw recursive::Mistake("line " + std::to_string(n) + ": " + mistake.what());
    }
  }
  if (!std::cout) throw recursive::Mistake("the answers can't be written");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
#ifdef __GLIBC__
  // Otherwise memory of tensors goes back to the system after each use, which takes as long as the
  // computation of a small model.
  mallopt(M_MMAP_THRESHOLD, 1 << 28);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
#endif
  try {
    return solve({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::cerr << "solve: " << error.what() << "\n";
    return 2;
  }
}
