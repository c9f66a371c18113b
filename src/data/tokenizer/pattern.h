#pragma once

// Regular expressions over UTF-8, as pre-tokenizers use them: PCRE2 with its just-in-time compiler.

#include <memory>
#include <string>
#include <string_view>

struct pcre2_real_code_8;
struct pcre2_real_match_data_8;
struct pcre2_real_match_context_8;
struct pcre2_real_jit_stack_8;

namespace titan::data {

/// What one thread needs to match: result slots, limits and the compiled code's stack.
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

  /// A Regex is in Oniguruma's dialect (oniguruma.h). Throws ConfigError with the pattern, the place and the
  /// reason.
  Pattern(const std::string& pattern, Kind kind);

  /// The first match at or after byte `start` of `text`, which must be valid UTF-8; false when there is none.
  /// Throws Error when the match limit is exceeded.
  bool find(std::string_view text, size_t start, PatternScratch& scratch, Match& match) const;

 private:
  [[noreturn]] void fail(int code, std::string_view text, size_t start) const;

  std::string pattern_;
  std::shared_ptr<pcre2_real_code_8> code_;
  bool jit_ = false;
};

/// `pattern` in Oniguruma's dialect, which the `tokenizers` package uses, as PCRE2 has to see it. Where the
/// two read the same text differently it is rewritten (`\s`, `\w`, properties by their Unicode version) or,
/// where that can't be said in PCRE2, refused: throws ConfigError with the pattern, the place and the reason.
std::string translate_oniguruma(const std::string& pattern);

}  // namespace titan::data
