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

  /// A text that is being split. Every pattern sees the whole text, so the words don't depend on how many are
  /// taken at once.
  class Course {
   public:
    Course() = default;
    Course(const Course&) = delete;
    Course& operator=(const Course&) = delete;

    bool is_done() const { return done_ == text_.size(); }

   private:
    friend class PreTokenizer;
    std::string_view text_;  // the caller's, or prefixed_
    std::string prefixed_;
    size_t stage_ = 0;  // the first with a pattern
    size_t done_ = 0;   // bytes that have been split
    size_t start_ = 0;  // where the next match is searched: after an empty match, past done_
    // All segments, and the next one; unused if the behavior is Isolated.
    std::vector<Scratch::Segment> segments_;
    size_t next_ = 0;
    bool is_cut_ = false;
  };

  /// Begins with `text`, which must stay in memory until the course is done.
  void begin(std::string_view text, Course& course) const;

  /// Calls `emit(std::string_view word)` for the next words in order: those up to the end of the next match
  /// of the first pattern. A word is valid until `emit` returns. Returns the number of bytes of the words.
  template <class Emit>
  size_t split_on(Course& course, Scratch& scratch, Emit&& emit) const {
    if (scratch.stages.size() < stages_.size()) scratch.stages.resize(stages_.size());
    const std::string_view text = course.text_;
    const size_t before = course.done_;
    if (course.stage_ == stages_.size()) {
      course.done_ = text.size();
      run(course.stage_, text, scratch, emit);
    } else if (stages_[course.stage_].behavior == SplitBehavior::Isolated) {
      isolate(course.stage_, text, course.done_, course.start_, scratch, emit);
    } else {
      if (!course.is_cut_) cut(stages_[course.stage_], text, scratch.pattern, course.segments_);
      course.is_cut_ = true;
      if (course.next_ < course.segments_.size()) {
        const auto [begin, end, matched] = course.segments_[course.next_++];
        run(course.stage_ + 1, text.substr(begin, end - begin), scratch, emit);
        course.done_ = end;
      }
      // Text after the last segment is removed.
      if (course.next_ == course.segments_.size()) course.done_ = text.size();
    }
    return course.done_ - before;
  }

  /// Calls `emit` for each word of the text.
  template <class Emit>
  void split(std::string_view text, Scratch& scratch, Emit&& emit) const {
    Course course;
    begin(text, course);
    while (!course.is_done()) split_on(course, scratch, emit);
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
    if (stage.behavior == SplitBehavior::Isolated) {
      for (size_t done = 0, start = 0; done < text.size();) isolate(index, text, done, start, scratch, emit);
      return;
    }
    auto& segments = scratch.stages[index].segments;
    cut(stage, text, scratch.pattern, segments);
    for (const auto& segment : segments)
      run(index + 1, text.substr(segment.begin, segment.end - segment.begin), scratch, emit);
  }

  // Handles by far the most common behavior, without a list of segments: the text up to the next match, and
  // the match; or else the rest.
  template <class Emit>
  void isolate(size_t index, std::string_view text, size_t& done, size_t& start, Scratch& scratch,
               Emit& emit) const {
    Match match{text.size(), text.size()};
    const bool found =
        start < text.size() && stages_[index].pattern->find(text, start, scratch.pattern, match);
    run(index + 1, text.substr(done, match.begin - done), scratch, emit);
    if (found) run(index + 1, text.substr(match.begin, match.end - match.begin), scratch, emit);
    done = match.end;
    start = found ? after(text, match) : text.size();
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
