#pragma once

// A fuzzer: a libFuzzer program (https://llvm.org/docs/LibFuzzer.html) that passes mutations of the files in
// tests/fuzz/corpus/<name> to a parser, under AddressSanitizer and UndefinedBehaviorSanitizer. It defines
// fuzz_input(). These end the program: a sanitizer's report, an exception other than the refusal that the
// parser's header promises, an allocation that the file merely claims to need (fuzz.cpp), a failed require().

#include <string>
#include <string_view>
#include <utility>

#include "titan/core/error.h"

namespace titan::fuzz {

/// The fuzzer's test of one input. `input` is on the heap, in an allocation of exactly its size.
void fuzz_input(std::string_view input);

/// Ends the program with a message unless `condition` holds.
void require(bool condition, const char* what);

/// Requires that an Error is a refusal: not an internal error, and naming `file`.
void require_refusal(const Error& error, std::string_view file);

/// Whether `parse` accepts the input. It refuses with an Error that names `file`.
template <class Parse>
bool accepted(std::string_view file, Parse&& parse) {
  try {
    std::forward<Parse>(parse)();
    return true;
  } catch (const Error& error) {
    require_refusal(error, file);
    return false;
  }
}

}  // namespace titan::fuzz
