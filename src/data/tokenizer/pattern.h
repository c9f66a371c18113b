#pragma once

// Regular expressions over UTF-8 for pre-tokenizers: PCRE2 with its just-in-time compiler.

#include <memory>
#include <string>
#include <string_view>

struct pcre2_real_code_8;
struct pcre2_real_match_data_8;
struct pcre2_real_match_context_8;
struct pcre2_real_jit_stack_8;

namespace titan::data {

/// A thread's memory for matching: result slots, limits, and the stack of compiled code.
class PatternScratch {
 public:
  PatternScratch();
  ~PatternScratch();
  PatternScratch(const PatternScratch&) = delete;
  PatternScratch& operator=(const PatternScratch&) = delete;

 private:
  friend class Pattern;
  pcre2_real_match_data_8* match_;
  pcre2_real_match_context_8* limits_;
  pcre2_real_jit_stack_8* stack_;
};

struct Match {
  size_t begin;
  size_t end;
};

/// A compiled pattern; immutable and thread-safe.
class Pattern {
 public:
  enum class Kind { Regex, Literal };

  /// A Regex is in Oniguruma's dialect. Throws ConfigError with the pattern, the position and the reason.
  Pattern(const std::string& pattern, Kind kind);

  /// Finds the first match at or after byte `start` of `text`, which must be valid UTF-8; returns false if
  /// there is none. Throws Error if the match limit is exceeded.
  bool find(std::string_view text, size_t start, PatternScratch& scratch, Match& match) const;

 private:
  [[noreturn]] void fail(int code, std::string_view text, size_t start) const;

  std::string pattern_;
  std::shared_ptr<pcre2_real_code_8> code_;
  bool jit_ = false;
};

/// Translates a pattern from Oniguruma's dialect, which the `tokenizers` package uses, to PCRE2's. Rewrites
/// what the two read differently (`\s`, `\w`, properties by their Unicode version). Throws ConfigError, with
/// the pattern, the position and the reason, for what PCRE2 can't express.
std::string translate_oniguruma(const std::string& pattern);

}  // namespace titan::data
