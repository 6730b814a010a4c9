// Checks for the native tests. A test is a program: it checks, goes on after a failure, and ends with
//
//   int main() { sums_wrap(); averages_round(); return report(); }
//
// `report` says what failed and gives the exit code. Checks may run on any thread of the process.
#pragma once

#include <concepts>
#include <cstdio>
#include <mutex>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>

#include "common/error.h"

namespace shoal::testing {

// What the checks of this program found so far.
class Tally {
 public:
  // True if this check's failure is one of the first few, which are described.
  bool count(bool passed) {
    std::lock_guard lock(mutex_);
    ++checks_;
    if (passed) return false;
    return ++failures_ <= described_at_most;
  }

  int report() {
    std::lock_guard lock(mutex_);
    if (failures_ > described_at_most)
      std::fprintf(stderr, "... and %ld more\n", failures_ - described_at_most);
    std::fprintf(stderr, "%ld checks, %ld failed\n", checks_, failures_);
    return failures_ == 0 && checks_ > 0 ? 0 : 1;
  }

 private:
  static constexpr long described_at_most = 50;

  std::mutex mutex_;
  long checks_ = 0;
  long failures_ = 0;
};

inline Tally& tally() {
  static Tally instance;
  return instance;
}

// std::cmp_equal's integers: it takes neither booleans nor characters.
template <typename T>
concept Number = std::integral<T> && !std::same_as<T, bool> && !std::same_as<T, char> &&
                 !std::same_as<T, wchar_t> && !std::same_as<T, char8_t> && !std::same_as<T, char16_t> &&
                 !std::same_as<T, char32_t>;

template <typename A, typename B>
bool equal(const A& a, const B& b) {
  if constexpr (Number<A> && Number<B>)
    return std::cmp_equal(a, b);
  else
    return a == b;
}

template <typename T>
std::string text_of(const T& value) {
  std::ostringstream text;
  if constexpr (std::is_enum_v<T>)
    text << +static_cast<std::underlying_type_t<T>>(value);
  else if constexpr (Number<T>)
    text << +value;  // a byte as a number
  else if constexpr (requires { text << value; })
    text << value;
  else
    text << "(a value without a text form)";
  return text.str();
}

inline void check(bool passed, const char* file, int line, const char* source) {
  if (tally().count(passed)) std::fprintf(stderr, "%s:%d: not so: %s\n", file, line, source);
}

template <typename A, typename B>
void check_equal(const A& a, const B& b, const char* file, int line, const char* source) {
  if (!tally().count(equal(a, b))) return;
  std::fprintf(stderr, "%s:%d: %s: %s is not %s\n", file, line, source, text_of(a).c_str(),
               text_of(b).c_str());
}

template <typename Call>
void check_throws(Call&& call, Code wanted, const char* file, int line, const char* source) {
  std::string found = "nothing";
  try {
    call();
  } catch (const Failure& failure) {
    found = "code " + text_of(failure.code) + " (" + failure.what() + ")";
    if (failure.code == wanted) found.clear();
  } catch (const std::exception& other) {
    found = std::string("another exception (") + other.what() + ")";
  }
  if (tally().count(found.empty()))
    std::fprintf(stderr, "%s:%d: %s: threw %s, not code %s\n", file, line, source, found.c_str(),
                 text_of(wanted).c_str());
}

inline int report() { return tally().report(); }

}  // namespace shoal::testing

using shoal::testing::report;

// Each is a statement. `code` is a shoal::Code that the expression's Failure must carry.
#define CHECK(...) ::shoal::testing::check(static_cast<bool>(__VA_ARGS__), __FILE__, __LINE__, #__VA_ARGS__)
#define CHECK_EQUAL(a, b) ::shoal::testing::check_equal((a), (b), __FILE__, __LINE__, #a " == " #b)
#define CHECK_THROWS(expression, code)                                                                  \
  ::shoal::testing::check_throws([&] { static_cast<void>(expression); }, (code), __FILE__, __LINE__, \
                                 #expression)
