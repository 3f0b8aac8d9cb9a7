// A strict reader of JSON (RFC 8259) that comes from strangers.

#pragma once

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace recursive {

// Says what is wrong with a text or a value.
class JsonError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Json {
 public:
  using List = std::vector<Json>;
  using Object = std::map<std::string, Json>;

  static Json parse(std::string_view text);

  // The value as one of a kind, or a JsonError, which calls the value by the name.
  bool flag(const std::string& name) const { return as<bool>(name, "true or false"); }
  double number(const std::string& name) const { return as<double>(name, "a number"); }
  const std::string& text(const std::string& name) const { return as<std::string>(name, "a text"); }
  const List& list(const std::string& name) const { return as<List>(name, "a list"); }
  const Object& object(const std::string& name) const { return as<Object>(name, "an object"); }

  std::int64_t whole(const std::string& name, std::int64_t least, std::int64_t most) const {
    const double found = number(name);
    if (!(found >= double(least) && found <= double(most)) || found != std::floor(found)) {
      throw JsonError(name + " is no whole number from " + std::to_string(least) + " to " +
                      std::to_string(most));
    }
    return static_cast<std::int64_t>(found);
  }

  bool is_text() const { return std::holds_alternative<std::string>(value_); }

  const Json& at(const std::string& key) const {
    const auto& entries = object("the whole");
    const auto found = entries.find(key);
    if (found == entries.end()) throw JsonError(key + " is missing");
    return found->second;
  }

 private:
  class Parser;

  template <class Kind>
  const Kind& as(const std::string& name, const char* what) const {
    if (const auto* found = std::get_if<Kind>(&value_)) return *found;
    throw JsonError(name + " is not " + what);
  }

  std::variant<std::nullptr_t, bool, double, std::string, List, Object> value_;
};

class Json::Parser {
 public:
  explicit Parser(std::string_view text) : rest_(text), size_(text.size()) {}

  Json whole() {
    Json found = value(0);
    require(rest_.empty());
    return found;
  }

 private:
  // Each level is a call on the stack.
  static constexpr int kDeepest = 100;

  // Read a value and the space around it.
  Json value(int depth) {
    require(depth <= kDeepest);
    skip_space();
    Json found;
    if (take("{")) {
      Object entries;
      for (bool first = true; follows("}", first); first = false) {
        std::string key = text();
        skip_space();
        require(take(":"));
        require(entries.emplace(std::move(key), value(depth + 1)).second);  // no key twice
      }
      found.value_ = std::move(entries);
    } else if (take("[")) {
      List items;
      for (bool first = true; follows("]", first); first = false) items.push_back(value(depth + 1));
      found.value_ = std::move(items);
    } else if (rest_.starts_with('"')) {
      found.value_ = text();
    } else if (take("true")) {
      found.value_ = true;
    } else if (take("false")) {
      found.value_ = false;
    } else if (!take("null")) {
      found.value_ = number();
    }
    skip_space();
    return found;
  }

  // Whether another entry of a list or an object follows.
  bool follows(std::string_view end, bool first) {
    skip_space();
    if (take(end)) return false;
    require(first || take(","));
    skip_space();
    return true;
  }

  double number() {
    // from_chars also takes "inf", "nan", ".5", "01" and "1.".
    const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
    const auto digits = rest_.substr(rest_.starts_with('-'));
    require(!digits.empty() && is_digit(digits[0]));
    require(digits[0] != '0' || digits.size() == 1 || !is_digit(digits[1]));
    double found = 0;
    const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), found);
    require(error == std::errc() && is_digit(end[-1]));
    rest_.remove_prefix(static_cast<std::size_t>(end - rest_.data()));
    return found;
  }

  std::string text() {
    static constexpr std::string_view kEscapes = "\"\\/bfnrt", kMeant = "\"\\/\b\f\n\r\t";
    require(take("\""));
    std::string found;
    while (!take("\"")) {
      const bool escaped = take("\\");
      require(!rest_.empty() && static_cast<unsigned char>(rest_[0]) >= 0x20);
      char next = rest_[0];
      if (escaped && take("u")) {
        unsigned code = 0;
        require(rest_.size() >= 4);
        require(std::from_chars(rest_.data(), rest_.data() + 4, code, 16).ptr == rest_.data() + 4);
        rest_.remove_prefix(4);
        // No text that this library uses has other characters than those of ASCII.
        found += code < 0x80 ? static_cast<char>(code) : '?';
        continue;
      }
      if (escaped) {
        const auto which = kEscapes.find(next);
        require(which != kEscapes.npos);
        next = kMeant[which];
      }
      found += next;
      rest_.remove_prefix(1);
    }
    return found;
  }

  bool take(std::string_view word) {
    if (!rest_.starts_with(word)) return false;
    rest_.remove_prefix(word.size());
    return true;
  }

  void skip_space() {
    rest_.remove_prefix(std::min(rest_.find_first_not_of(" \t\n\r"), rest_.size()));
  }

  void require(bool right) const {
    if (!right) throw JsonError("no JSON at byte " + std::to_string(size_ - rest_.size()));
  }

  std::string_view rest_;
  std::size_t size_;
};

inline Json Json::parse(std::string_view text) { return Parser(text).whole(); }

}  // namespace recursive
