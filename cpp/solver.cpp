#include "solver.h"

#include <ATen/Parallel.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/script.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <limits>
#include <map>
#include <utility>

#include "host.h"

namespace recursive {
namespace {

using at::Tensor;
using Run = std::function<std::vector<Tensor>(const std::vector<Tensor>&)>;
using Named = std::map<std::string, Tensor>;

constexpr int kMostRestarts = 999'999;

// ---- what a segment reads ----------------------------------------------------------------------

// models/dropout.py: seeds for the parts of a seed. Numbers of 32 bits wrap around.
std::uint32_t derived(std::uint32_t seed, std::uint32_t number) {
  std::uint32_t hashed = seed + (number + 1) * 0x9E3779B9U;
  hashed = (hashed ^ hashed >> 16) * 0x21F0AAADU;
  hashed = (hashed ^ hashed >> 15) * 0x735A2D97U;
  return hashed ^ hashed >> 15;
}

// models/noise.py, full_strength: (1, cells, vocabulary).
Tensor noise_of(std::uint32_t seed, const Board& board, bool is_annealed) {
  const std::uint32_t stream = derived(seed, 1);
  Tensor noise = at::empty({1, board.cells, board.vocabulary});
  float* place = noise.data_ptr<float>();
  for (std::int64_t n = 0; n < noise.numel(); ++n) {
    const std::uint32_t bits = derived(stream, static_cast<std::uint32_t>(n)) >> 9;
    place[n] = 2 * ((static_cast<float>(bits) + 0.5F) / 8388608) - 1;
  }
  const double vocabulary = static_cast<double>(board.vocabulary);
  return at::erfinv(noise) * std::sqrt(is_annealed ? 2 / vocabulary : 2);
}

// models/se_mixer.py, units_of_board: 1 for each cell of a row, a column or a box.
Tensor units_of(const Board& board) {
  const std::int64_t side = board.vocabulary - 2;
  std::int64_t rows = static_cast<std::int64_t>(std::sqrt(static_cast<double>(side)));
  while (side % rows != 0) --rows;
  const std::int64_t columns = side / rows;
  Tensor units = at::zeros({3 * side, board.cells});
  auto member = units.accessor<float, 2>();
  for (std::int64_t cell = 0; cell < board.cells; ++cell) {
    const std::int64_t row = cell / side, column = cell % side;
    member[row][cell] = 1;
    member[side + column][cell] = 1;
    member[2 * side + row / rows * rows + column / columns][cell] = 1;
  }
  return units;
}

// ---- files -------------------------------------------------------------------------------------

// Silences what AOTInductor prints of each error that it also throws.
class Quiet {
 public:
  Quiet() : buffer_(std::cerr.rdbuf(nullptr)) {}
  ~Quiet() { std::cerr.rdbuf(buffer_); }
  Quiet(const Quiet&) = delete;
  Quiet& operator=(const Quiet&) = delete;

 private:
  std::streambuf* buffer_;
};

// A package for another kind of CPU would end the program at its first unknown instruction.
void require_this_cpu([[maybe_unused]] const std::filesystem::path& file) {
#if defined(__x86_64__)
  auto metadata =
      torch::inductor::AOTIModelPackageLoader::load_metadata_from_package(file.string(), "model");
  const bool needs = metadata["AOTI_CPU_ISA"].starts_with("AVX512");
  if (needs && !(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))) {
    throw Mistake(file.string() +
                  " was compiled for CPUs with AVX-512; export it on a machine like this one");
  }
#endif
}

// A package whose first run is in the life of this checks the sizes of its inputs in all its runs.
// Without the checks wrong sizes make it read foreign memory. With them it refuses a batch of one.
class SizeChecks {
 public:
  SizeChecks() { setenv(kName, "1", 1); }
  ~SizeChecks() { unsetenv(kName); }
  SizeChecks(const SizeChecks&) = delete;
  SizeChecks& operator=(const SizeChecks&) = delete;

 private:
  static constexpr const char* kName = "AOTI_RUNTIME_CHECK_INPUTS";
};

Run run_of(const std::filesystem::path& file) {
  if (file.extension() == ".pt2") {
    auto loader = std::make_shared<torch::inductor::AOTIModelPackageLoader>(file.string());
    return [loader](const std::vector<Tensor>& inputs) { return loader->run(inputs); };
  }
  torch::jit::Module module = torch::jit::load(file.string());
  module.eval();
  module = torch::jit::freeze(module, std::nullopt, /*optimize_numerics=*/false);
  return [module](const std::vector<Tensor>& inputs) mutable {
    // The optimizer would compile for the first size of board, and others would run slower.
    const torch::jit::GraphOptimizerEnabledGuard off(false);
    const auto outputs = module.forward({inputs.begin(), inputs.end()}).toTuple();
    std::vector<Tensor> found;
    for (const auto& output : outputs->elements()) found.push_back(output.toTensor());
    return found;
  };
}

// q_halt for comparisons. NaN is the lowest.
float rank(float q_halt) {
  return std::isnan(q_halt) ? -std::numeric_limits<float>::infinity() : q_halt;
}

std::string shown(char c) {
  if (c >= ' ' && c <= '~') return std::string("'") + c + "'";
  const char* digits = "0123456789abcdef";
  const auto byte = static_cast<unsigned char>(c);
  return std::string("the byte 0x") + digits[byte >> 4] + digits[byte & 15];
}

}  // namespace

// ---- the model ---------------------------------------------------------------------------------

struct Solver::Model {
  struct Pass {
    Tensor answer;  // (cells,)
    float q_halt = 0;
    int segments = 0;
    bool settled = false;
  };

  Host host;
  Run run;

  Board board_of(std::size_t num_cells) const {
    std::string sizes;
    for (const Board& board : host.boards()) {
      if (std::cmp_equal(board.cells, num_cells)) return board;
      sizes += (sizes.empty() ? "" : ", ") + std::to_string(board.cells);
    }
    throw Mistake("the puzzle has " + std::to_string(num_cells) +
                  " cells, but this model's puzzles have " + sizes +
                  "; give a character for each cell, row by row");
  }

  // models/trajectories.py: what trajectory k reads in its first segment.
  Named start(const Tensor& tokens, const Board& board, int k) const {
    Named given{{"tokens", tokens}, {"puzzles", at::zeros({1}, at::kInt)}};
    if (host.any_size) given["units"] = units_of(board);
    std::vector<std::int64_t> shape{1};
    for (const std::int64_t size : host.state_shape) {
      shape.push_back(size == Host::kCells     ? board.cells
                      : size == Host::kSymbols ? board.vocabulary - 2
                                               : size);
    }
    for (const auto& [name, rows] : host.starts) {
      const auto& row = rows[static_cast<std::size_t>(k) % rows.size()];
      given[name] = at::tensor(row).expand(shape).contiguous();
    }
    return given;
  }

  Named segment(const Named& given) const {
    std::vector<Tensor> inputs;
    for (const auto& name : host.inputs) inputs.push_back(given.at(name));
    const auto outputs = run(inputs);
    if (outputs.size() != host.outputs.size()) throw std::runtime_error("it has other outputs");
    Named named;
    for (std::size_t n = 0; n < outputs.size(); ++n) {
      named[host.outputs[n]] = outputs[n].contiguous();
    }
    return named;
  }

  Pass pass(const Tensor& tokens, const Board& board, int k, const Options& options) const {
    Named given = start(tokens, board, k);
    const std::uint32_t seed = derived(k > 0 ? options.seed : 0, static_cast<std::uint32_t>(k));
    Pass found;
    while (found.segments < host.segments && (options.all_segments || !found.settled)) {
      ++found.segments;
      if (host.noise != "none") {
        const auto number = static_cast<std::uint32_t>(found.segments);
        given["noise"] = noise_of(derived(seed, number), board, host.noise == "annealed");
      }
      Named outputs = segment(given);
      for (const auto& name : host.states) given[name] = outputs.at("next_" + name);
      const Tensor answer = outputs.at("logits").argmax(-1);
      found.q_halt = outputs.at("q_halt").item<float>();
      const float least = host.values_going_on ? outputs.at("q_continue").item<float>() : 0;
      found.settled = found.q_halt > least && found.segments > 1 && answer.equal(found.answer);
      found.answer = answer;
    }
    return found;
  }

  // Run one segment, and see that its outputs are those that config.json describes.
  void require_shapes(std::int64_t batch) const {
    const Board board = host.boards().front();
    Named given = start(at::ones({1, board.cells}, at::kInt), board, 0);
    given["noise"] = at::zeros({1, board.cells, board.vocabulary});
    for (auto& [name, tensor] : given) {
      if (name != "units") tensor = tensor.repeat_interleave(batch, 0);
    }
    const Named outputs = segment(given);
    std::map<std::string, std::vector<std::int64_t>> expected{
        {"logits", {batch, board.cells, board.vocabulary}},
        {"q_halt", {batch}},
        {"q_continue", {batch}}};
    for (const auto& name : host.states) expected["next_" + name] = given.at(name).sizes().vec();
    for (const auto& [name, shape] : expected) {
      if (outputs.at(name).sizes() != shape || outputs.at(name).scalar_type() != at::kFloat) {
        throw std::runtime_error(name + " has another shape");
      }
    }
  }

  void require_different_passes(const Options& options) const {
    const auto restarts = std::to_string(options.restarts);
    if (options.restarts < 0 || options.restarts > kMostRestarts) {
      throw Mistake("restarts is " + restarts + "; give 0 to " + std::to_string(kMostRestarts));
    }
    if (host.noise != "none") return;
    const std::size_t num_starts =
        host.states.empty() ? 1 : host.starts.at(host.states.back()).size();
    if (std::cmp_less_equal(num_starts, options.restarts)) {
      throw Mistake("restarts is " + restarts + ", but the model reads no noise, and so has only " +
                    std::to_string(num_starts - 1) + " restarts that differ; give at most that");
    }
    if (options.seed != 0) {
      throw Mistake("the seed is that of the noise, but this model reads none; leave it out");
    }
  }
};

Solver Solver::load(const std::filesystem::path& folder) {
  auto model = std::make_unique<Model>();
  model->host = Host::read(folder);
  const c10::InferenceMode guard;
  const Quiet quiet;
  std::string problem;
  try {
    const auto& file = model->host.file;
    if (file.extension() == ".pt2") {
      require_this_cpu(file);
      const SizeChecks checks;
      model->run = run_of(file);
      model->require_shapes(2);
    }
    model->run = run_of(file);
    model->require_shapes(1);
    return Solver(std::move(model));
  } catch (const Mistake&) {
    throw;
  } catch (const c10::Error& error) {
    problem = one_line(error.what_without_backtrace());
  } catch (const std::exception& error) {
    problem = one_line(error.what());
  }
  throw Mistake(model->host.file.string() +
                " doesn't fit config.json beside it, or this PyTorch (" + problem +
                "); export it again");
}

Answer Solver::solve(std::span<const std::uint8_t> tokens, const Options& options) const {
  model_->require_different_passes(options);
  const Board board = model_->board_of(tokens.size());
  for (const std::uint8_t token : tokens) {
    // Token 0 is padding, which only the canvas of a fixed size has.
    if (token >= board.vocabulary || (token == 0 && model_->host.any_size)) {
      throw Mistake("the puzzle has the token " + std::to_string(token) +
                    ", which is no cell of this board; give 1 to " +
                    std::to_string(board.vocabulary - 1));
    }
  }
  const c10::InferenceMode guard;
  Tensor inputs = at::empty({1, board.cells}, at::kInt);
  std::copy(tokens.begin(), tokens.end(), inputs.data_ptr<std::int32_t>());
  try {
    Model::Pass best = model_->pass(inputs, board, 0, options);
    int segments = best.segments;
    for (int k = 1; k <= options.restarts && !best.settled; ++k) {
      Model::Pass next = model_->pass(inputs, board, k, options);
      segments += next.segments;
      if (next.settled || rank(next.q_halt) > rank(best.q_halt)) best = std::move(next);
    }
    const auto* answer = best.answer.data_ptr<std::int64_t>();
    return {
        {answer, answer + board.cells}, 1 / (1 + std::exp(-best.q_halt)), segments, best.settled};
  } catch (const c10::Error& error) {
    throw Mistake("the model failed (" + one_line(error.what_without_backtrace()) +
                  "); export it again");
  }
}

std::vector<std::uint8_t> Solver::read(std::string_view line) const {
  if (line.ends_with('\r')) line.remove_suffix(1);
  if (line.empty()) {
    throw Mistake("the puzzle is empty; give a character for each cell, row by row");
  }
  const std::string& symbols = model_->host.symbols;
  if (symbols.empty()) {
    throw Mistake("this model's boards are no texts; give their tokens to solve()");
  }
  const auto num_symbols = static_cast<std::size_t>(model_->board_of(line.size()).vocabulary);
  std::vector<std::uint8_t> tokens;
  for (char c : line) {
    if (model_->host.is_sudoku()) {
      if (c == '0' || c == 'x' || c == 'X') c = symbols[1];
      if (c >= 'a' && c <= 'z') c = static_cast<char>(c - 'a' + 'A');
    }
    const std::size_t token = symbols.find(c, 1);  // the first stands for padding
    if (token >= num_symbols) {
      throw Mistake("the puzzle has " + shown(line[tokens.size()]) + " in cell " +
                    std::to_string(tokens.size() + 1) + ", where only " +
                    symbols.substr(1, num_symbols - 1) + " can be; correct the cell");
    }
    tokens.push_back(static_cast<std::uint8_t>(token));
  }
  return tokens;
}

std::string Solver::write(std::span<const std::uint8_t> tokens) const {
  std::string line;
  for (const std::uint8_t token : tokens) {
    if (token >= model_->host.symbols.size()) throw Mistake("a token has no symbol in this model");
    line += model_->host.symbols[token];
  }
  return line;
}

void Solver::use_threads(int count) { at::set_num_threads(count); }

Solver::Solver(std::unique_ptr<Model> model) : model_(std::move(model)) {}
Solver::Solver(Solver&&) noexcept = default;
Solver& Solver::operator=(Solver&&) noexcept = default;
Solver::~Solver() = default;

}  // namespace recursive
