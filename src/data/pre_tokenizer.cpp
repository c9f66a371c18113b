#include "pre_tokenizer.h"

#include <algorithm>

#include "utf8.h"

namespace titan::data {
namespace {

using Segment = PreTokenizer::Scratch::Segment;

// A match joins the neighbour before it, unless that one is a match too.
void merge_with_previous(std::vector<Segment>& segments) {
  size_t kept = 0;
  bool previous_matched = false;
  for (const Segment segment : segments) {
    bool joins = segment.matched && !previous_matched && kept > 0;
    previous_matched = segment.matched;
    if (joins)
      segments[kept - 1].end = segment.end;
    else
      segments[kept++] = segment;
  }
  segments.resize(kept);
}

void merge_with_next(std::vector<Segment>& segments) {
  std::reverse(segments.begin(), segments.end());
  size_t kept = 0;
  bool previous_matched = false;
  for (const Segment segment : segments) {
    bool joins = segment.matched && !previous_matched && kept > 0;
    previous_matched = segment.matched;
    if (joins)
      segments[kept - 1].begin = segment.begin;
    else
      segments[kept++] = segment;
  }
  segments.resize(kept);
  std::reverse(segments.begin(), segments.end());
}

void join_alike(std::vector<Segment>& segments) {
  size_t kept = 0;
  for (const Segment segment : segments) {
    if (kept > 0 && segments[kept - 1].matched == segment.matched)
      segments[kept - 1].end = segment.end;
    else
      segments[kept++] = segment;
  }
  segments.resize(kept);
}

}  // namespace

size_t PreTokenizer::after(std::string_view text, Match match) {
  if (match.end > match.begin) return match.end;
  size_t next = match.end + 1;
  while (next < text.size() && !starts_character(text[next])) ++next;
  return next;
}

void PreTokenizer::cut(const SplitStage& stage, std::string_view text, PatternScratch& scratch,
                       std::vector<Segment>& segments) {
  segments.clear();
  size_t done = 0;
  Match match;
  for (size_t start = 0; start < text.size() && stage.pattern->find(text, start, scratch, match);
       start = after(text, match)) {
    if (done < match.begin) segments.push_back({done, match.begin, stage.invert});
    segments.push_back({match.begin, match.end, !stage.invert});
    done = match.end;
  }
  if (done < text.size()) segments.push_back({done, text.size(), stage.invert});
  switch (stage.behavior) {
    case SplitBehavior::Isolated:
      return;
    case SplitBehavior::Removed:
      std::erase_if(segments, [](const Segment& s) { return s.matched; });
      return;
    case SplitBehavior::MergedWithPrevious:
      return merge_with_previous(segments);
    case SplitBehavior::MergedWithNext:
      return merge_with_next(segments);
    case SplitBehavior::Contiguous:
      return join_alike(segments);
  }
}

}  // namespace titan::data
