#pragma once

// Splits text into words, within which bytes are merged: the `pre_tokenizer` of a tokenizer.json as a list of
// stages.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/json.h"
#include "data/tokenizer/pattern.h"

namespace titan::data {

/// What happens to the matches of a pattern, by Hugging Face's names.
enum class SplitBehavior { Isolated, Removed, MergedWithPrevious, MergedWithNext, Contiguous };

/// One step; the next one gets each of its parts.
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

  // By far the most common behavior, without a list of segments.
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
