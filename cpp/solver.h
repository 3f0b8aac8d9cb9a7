// Solve puzzles with a model that `python -m sharing.export --format aoti|torchscript` wrote.
//
//     recursive::Solver solver = recursive::Solver::load("out");
//     auto answer = solver.solve(solver.read(
//         "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"));
//     std::cout << solver.write(answer.tokens) << "\n";

#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace recursive {

// What is wrong and what to do, in one line. Every mistake in a file, a puzzle or an option is one.
class Mistake : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Options {
  // How many more passes a puzzle gets at most. Each runs only if no pass before it settled. It
  // begins with another of the model's initial states, or reads other noise.
  int restarts = 0;

  // Of the noise that restarts read.
  std::uint32_t seed = 0;

  // A pass ends when its answer settles: the model would halt, and the answer is that of the
  // segment before. This is how evaluate.py adaptive=true counts. The shipped model is then three
  // times as fast, and right a little more often. With all_segments a pass runs all of its segments
  // and answers with the last, as solve.py does.
  bool all_segments = false;
};

struct Answer {
  std::vector<std::uint8_t> tokens;  // one for each cell, row by row
  double confidence;                 // the model's estimate of the probability that it is right
  int segments;                      // of all passes together
  bool settled;                      // whether the answer did; most wrong answers do not
};

// A model that is ready to solve. Only one thread may use it at a time.
class Solver {
 public:
  // Load a folder with config.json and model.pt2 or model.pt, as the export wrote it.
  //
  // The sizes and the SHA-256 of the file are checked, and one segment is run. But model.pt2
  // (AOTInductor) is compiled code, which runs with the rights of this program: load only a folder
  // whose author you would trust with a program. model.pt (TorchScript) is data for an interpreter,
  // which was never promised to be safe against forged files either.
  static Solver load(const std::filesystem::path& folder);

  // Answer one puzzle: a token for each cell, row by row. Of a Sudoku 1 is a blank, and d + 1 the
  // digit d. A model that reads boards of any size takes 4x4, 6x6, 8x8, 9x9, 12x12 and 16x16.
  // Whether the puzzle keeps the rules of its task is not checked.
  Answer solve(std::span<const std::uint8_t> tokens, const Options& options = {}) const;

  // Turn a line of text into tokens and back, a character for each cell. In a Sudoku 0, x and X are
  // blanks too, and letters may be small. A line may end with \r.
  std::vector<std::uint8_t> read(std::string_view line) const;
  std::string write(std::span<const std::uint8_t> tokens) const;

  // Threads that a segment may use, of the whole process. Small models are fastest with one.
  static void use_threads(int count);

  Solver(Solver&&) noexcept;
  Solver& operator=(Solver&&) noexcept;
  ~Solver();

 private:
  struct Model;
  explicit Solver(std::unique_ptr<Model> model);
  std::unique_ptr<Model> model_;
};

}  // namespace recursive
