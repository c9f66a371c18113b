#pragma once

// A fuzzer: a program of libFuzzer's (https://llvm.org/docs/LibFuzzer.html) that hands mutations of the files
// in tests/fuzz/corpus/<name> to a parser, under AddressSanitizer and UndefinedBehaviorSanitizer. It defines
// fuzz_input(). A finding ends the program: what a sanitizer reports, an exception that isn't the refusal
// that the parser's header promises, an allocation that the file only claims to need (fuzz.cpp), a broken
// require().

#include <string>
#include <string_view>
#include <utility>

#include "titan/core/error.h"

namespace titan::fuzz {

/// What the fuzzer is about. `input` lies on the heap, exactly as large as it is.
void fuzz_input(std::string_view input);

/// Ends the program, saying so, unless `condition` holds.
void require(bool condition, const char* what);

/// Requires that an Error is a refusal: not a bug's, and naming `file`.
void require_refusal(const Error& error, std::string_view file);

/// Whether `parse` takes the input. It refuses by an Error that names `file`.
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
