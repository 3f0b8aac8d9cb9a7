#include "host.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <set>
#include <utility>

#include "json.h"
#include "sha256.h"
#include "solver.h"

namespace recursive {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFix =
    "; copy the whole folder that python -m sharing.export wrote, or export it again";
constexpr std::int64_t kMost = 1 << 20;
constexpr std::int64_t kMostNumbers = 1 << 28;  // of a state, far above any model
constexpr std::size_t kLargestConfig = 1 << 24;

std::vector<std::string> texts(const Json& json, const std::string& name) {
  std::vector<std::string> found;
  for (const auto& item : json.at(name).list(name)) found.push_back(item.text(name));
  if (std::set<std::string>(found.begin(), found.end()).size() != found.size()) {
    throw JsonError(name + " has a name twice");
  }
  return found;
}

void require(bool right, const std::string& otherwise) {
  if (!right) throw JsonError(otherwise);
}

// The file's name. The folder is the caller's, so the name must not lead out of it.
fs::path file_of(const Json& json, const fs::path& config) {
  const std::string& name = json.at("file").text("file");
  if (name != "model.pt2" && name != "model.pt") {
    throw Mistake(config.string() +
                  " describes a file of another format, which this program does not read; export "
                  "with --format aoti or --format torchscript");
  }
  return config.parent_path() / name;
}

void read_names(Host& host, const Json& json) {
  host.inputs = texts(json, "inputs");
  host.outputs = texts(json, "outputs");
  std::vector<std::string> inputs, outputs{"logits", "q_halt", "q_continue"};
  for (const char* name : {"tokens", "puzzles", "noise", "units"}) {
    if (host.has(name)) inputs.push_back(name);
  }
  for (const auto& name : host.inputs) {
    if (std::find(inputs.begin(), inputs.end(), name) != inputs.end()) continue;
    host.states.push_back(name);
    inputs.push_back(name);
    outputs.push_back("next_" + name);
  }
  require(host.outputs != std::vector<std::string>{"logits"}, "it answers texts, not puzzles");
  require(host.has("tokens") && host.inputs == inputs && host.outputs == outputs,
          "inputs and outputs are unknown");
  require(host.has("units") == host.any_size, "any_size and inputs don't fit");
  require(host.has("noise") == (host.noise != "none"), "noise and inputs don't fit");
}

void read_state(Host& host, const Json& json) {
  std::int64_t numbers = 1;
  for (const auto& item : json.at("state_shape").list("state_shape")) {
    if (item.is_text()) {
      const std::string& size = item.text("state_shape");
      require(host.any_size && (size == "cells" || size == "symbols"),
              "state_shape has a size without meaning");
      host.state_shape.push_back(size == "cells" ? Host::kCells : Host::kSymbols);
    } else {
      host.state_shape.push_back(item.whole("state_shape", 1, kMost));
      numbers *= host.state_shape.back();
      require(numbers <= kMostNumbers, "state_shape is too large");
    }
  }
  if (host.any_size) {
    const auto& shape = host.state_shape;
    require(shape.size() == 3 && shape[0] == Host::kCells && shape[1] == Host::kSymbols &&
                shape[2] >= 1,
            "state_shape doesn't fit any_size");
  }
  const auto& starts = json.at("starts").object("starts");
  require(starts.size() == host.states.size(), "starts and inputs don't fit");
  for (const auto& name : host.states) {
    require(starts.contains(name), "starts and inputs don't fit");
    for (const auto& row : starts.at(name).list("starts")) {
      auto& numbers_of_row = host.starts[name].emplace_back();
      for (const auto& item : row.list("starts")) {
        numbers_of_row.push_back(static_cast<float>(item.number("starts")));
        require(std::isfinite(numbers_of_row.back()), "starts has a number that is too large");
      }
      require(!host.state_shape.empty() &&
                  std::cmp_equal(numbers_of_row.size(), host.state_shape.back()),
              "starts and state_shape don't fit");
    }
    const std::size_t num_rows = host.starts[name].size();
    require(num_rows >= 1 && (num_rows == 1 || name == host.states.back()),
            "starts has a wrong number of rows");
  }
}

Host described(const Json& json, const fs::path& config) {
  Host host;
  host.file = file_of(json, config);
  host.any_size = json.at("any_size").flag("any_size");
  host.noise = json.at("noise").text("noise");
  require(host.noise == "none" || host.noise == "fresh" || host.noise == "annealed",
          "noise is unknown");
  read_names(host, json);
  read_state(host, json);
  host.segments = json.at("segments").whole("segments", 1, kMost);
  host.values_going_on = json.at("values_going_on").flag("values_going_on");
  host.symbols = json.at("symbols").text("symbols");
  const Json& model = json.at("model");
  host.board = {model.at("seq_len").whole("seq_len", 1, kMost),
                model.at("vocab_size").whole("vocab_size", 2, 256)};  // tokens are bytes
  const auto is_printed = [](char c) { return c >= ' ' && c <= '~'; };
  require(std::all_of(host.symbols.begin(), host.symbols.end(), is_printed) &&
              (host.any_size || host.symbols.empty() ||
               std::cmp_equal(host.symbols.size(), host.board.vocabulary)),
          "symbols doesn't fit the vocabulary");
  require(!host.boards().empty(), "symbols has too few symbols");
  return host;
}

}  // namespace

bool Host::has(const std::string& input) const {
  return std::find(inputs.begin(), inputs.end(), input) != inputs.end();
}

std::vector<Board> Host::boards() const {
  if (!any_size) return {board};
  std::vector<Board> found;
  for (const std::int64_t side : {4, 6, 8, 9, 12, 16}) {
    if (std::cmp_less_equal(side + 2, symbols.size())) found.push_back({side * side, side + 2});
  }
  return found;
}

Host Host::read(const fs::path& folder) {
  const fs::path config = folder / "config.json";
  std::error_code error;
  if (!fs::is_regular_file(config, error)) {
    throw Mistake(folder.string() +
                  " has no config.json; give the folder that python -m sharing.export wrote");
  }
  const std::uintmax_t size = fs::file_size(config, error);
  std::string text(size <= kLargestConfig ? size : 0, ' ');
  if (text.empty() ||
      !std::ifstream(config, std::ios::binary).read(text.data(), std::streamsize(text.size()))) {
    throw Mistake(config.string() + " can't be read, or is empty or far too large" + kFix);
  }
  try {
    const Json json = Json::parse(text);
    if (json.at("format").number("format") != 1) {
      throw Mistake(config.string() +
                    " is not of format 1; update this program, or export the model again");
    }
    Host host = described(json, config);
    std::ifstream file(host.file, std::ios::binary);
    if (!fs::is_regular_file(host.file, error) || !file) {
      throw Mistake(host.file.string() + " can't be read" + kFix);
    }
    if (Sha256::of(file) != json.at("sha256").text("sha256")) {
      throw Mistake(host.file.string() + " is not the file that config.json describes" + kFix);
    }
    return host;
  } catch (const JsonError& problem) {
    throw Mistake(config.string() + " describes no model of puzzles (" + problem.what() + ")" +
                  kFix);
  }
}

std::string one_line(const std::string& message) {
  std::string line = message.substr(0, std::min(message.find('\n'), message.find(". ")));
  std::replace_if(
      line.begin(), line.end(), [](unsigned char c) { return c < ' ' || c == 127; }, ' ');
  return line;
}

}  // namespace recursive
