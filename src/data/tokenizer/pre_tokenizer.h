#pragma once

// Splits text into words, within which bytes are merged: the `pre_tokenizer` of a tokenizer.json as a list of
// stages, with regular expressions over UTF-8 by PCRE2 and its just-in-time compiler.

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/json.h"

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
  std::string pattern_;
  std::shared_ptr<pcre2_real_code_8> code_;
  bool jit_ = false;
};

// ---- splitting

/// The ways to treat the matches of a pattern, under Hugging Face's names.
enum class SplitBehavior { Isolated, Removed, MergedWithPrevious, MergedWithNext, Contiguous };

/// One step of splitting. The next stage gets each of its parts.
struct SplitStage {
  bool add_prefix_space = false;   ///< adds a space to a part that doesn't begin with one
  std::optional<Pattern> pattern;  ///< none: the part stays whole
  SplitBehavior behavior = SplitBehavior::Isolated;
  bool invert = false;  ///< the text between matches counts as the match
};

class PreTokenizer {
 public:
  /// Buffers of one thread, reused from text to text.
  struct Scratch {
    PatternScratch pattern;
    struct Segment {
      size_t begin, end;
      bool matched;
    };
    struct Stage {
      std::string prefixed;
      std::vector<Segment> segments;
    };
    std::vector<Stage> stages;
  };

  explicit PreTokenizer(std::vector<SplitStage> stages = {}) : stages_(std::move(stages)) {}

  /// Calls `emit(std::string_view word)` for each word in order; a word is valid until `emit` returns.
  template <class Emit>
  void split(std::string_view text, Scratch& scratch, Emit&& emit) const {
    if (scratch.stages.size() < stages_.size()) scratch.stages.resize(stages_.size());
    run(0, text, scratch, emit);
  }

 private:
  template <class Emit>
  void run(size_t index, std::string_view text, Scratch& scratch, Emit& emit) const {
    if (text.empty()) return;
    if (index == stages_.size()) return emit(text);
    const SplitStage& stage = stages_[index];
    if (stage.add_prefix_space && text[0] != ' ') {
      std::string& prefixed = scratch.stages[index].prefixed;
      prefixed.assign(1, ' ').append(text);
      text = prefixed;
    }
    if (!stage.pattern) return run(index + 1, text, scratch, emit);
    if (stage.behavior == SplitBehavior::Isolated) return isolate(index, text, scratch, emit);
    auto& segments = scratch.stages[index].segments;
    cut(stage, text, scratch.pattern, segments);
    for (const auto& segment : segments)
      run(index + 1, text.substr(segment.begin, segment.end - segment.begin), scratch, emit);
  }

  // Handles by far the most common behavior, without a list of segments.
  template <class Emit>
  void isolate(size_t index, std::string_view text, Scratch& scratch, Emit& emit) const {
    size_t done = 0;
    Match match;
    for (size_t start = 0;
         start < text.size() && stages_[index].pattern->find(text, start, scratch.pattern, match);) {
      run(index + 1, text.substr(done, match.begin - done), scratch, emit);
      run(index + 1, text.substr(match.begin, match.end - match.begin), scratch, emit);
      done = match.end;
      start = after(text, match);
    }
    run(index + 1, text.substr(done), scratch, emit);
  }

  // Where to search next: one character past an empty match.
  static size_t after(std::string_view text, Match match);
  static void cut(const SplitStage& stage, std::string_view text, PatternScratch& pattern,
                  std::vector<Scratch::Segment>& segments);

  std::vector<SplitStage> stages_;
};

}  // namespace titan::data

namespace titan::data::bpe {

/// Reads `pre_tokenizer` of a tokenizer.json. Throws ConfigError with the part that isn't supported.
PreTokenizer read_pre_tokenizer(const JsonFile& file);

}  // namespace titan::data::bpe
