#include "pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "oniguruma.h"
#include "titan/core/error.h"

namespace titan::data {
namespace {

// A single word of ordinary text takes tens of steps; this bounds a hostile one to about a tenth of a second.
constexpr uint32_t kMatchLimit = 10'000'000;
constexpr size_t kFirstStackBytes = 32 << 10;
constexpr size_t kLargestStackBytes = 8 << 20;

std::string error_text(int code) {
  PCRE2_UCHAR buffer[256];
  pcre2_get_error_message(code, buffer, sizeof buffer);
  return reinterpret_cast<const char*>(buffer);
}

}  // namespace

PatternScratch::PatternScratch()
    : match_(pcre2_match_data_create(1, nullptr)),
      limits_(pcre2_match_context_create(nullptr)),
      stack_(pcre2_jit_stack_create(kFirstStackBytes, kLargestStackBytes, nullptr)) {
  TITAN_CHECK(match_ && limits_ && stack_, "no memory for a regular expression's stack");
  pcre2_set_match_limit(limits_, kMatchLimit);
  pcre2_jit_stack_assign(limits_, nullptr, stack_);
}

PatternScratch::~PatternScratch() {
  pcre2_match_data_free(match_);
  pcre2_match_context_free(limits_);
  pcre2_jit_stack_free(stack_);
}

Pattern::Pattern(const std::string& pattern, Kind kind) : pattern_(pattern) {
  bool literal = kind == Kind::Literal;
  std::string source = literal ? pattern : translate_oniguruma(pattern);
  // ^ and $ are always those of a line in Oniguruma. \C would cut characters apart, and matching what is left
  // read beyond it.
  uint32_t options =
      PCRE2_UTF | (literal ? PCRE2_LITERAL : PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C);
  int code = 0;
  size_t offset = 0;
  auto* text = reinterpret_cast<PCRE2_SPTR>(source.data());
  code_.reset(pcre2_compile(text, source.size(), options, &code, &offset, nullptr),
              [](pcre2_real_code_8* compiled) { pcre2_code_free(compiled); });
  if (!code_)
    throw ConfigError(
        str("pattern '", pattern, "': ", error_text(code), " (near '", source.substr(offset), "')"));
  // Where the platform has no just-in-time compiler the interpreter serves, slower.
  jit_ = pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE) == 0;
}

bool Pattern::find(std::string_view text, size_t start, PatternScratch& scratch, Match& match) const {
  auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  auto matcher = jit_ ? pcre2_jit_match : pcre2_match;
  int code =
      matcher(code_.get(), subject, text.size(), start, PCRE2_NO_UTF_CHECK, scratch.match_, scratch.limits_);
  if (code == PCRE2_ERROR_NOMATCH) return false;
  if (code < 0) fail(code, text, start);
  const size_t* ends = pcre2_get_ovector_pointer(scratch.match_);
  match = {ends[0], ends[1]};
  return true;
}

void Pattern::fail(int code, std::string_view text, size_t start) const {
  throw Error(str("splitting text with pattern '", pattern_, "' failed at byte ", start, " of ", text.size(),
                  ": ", error_text(code)));
}

}  // namespace titan::data
