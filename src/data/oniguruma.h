#pragma once

#include <string>

namespace titan::data {

/// `pattern` in Oniguruma's dialect, which the `tokenizers` package uses, as PCRE2 has to see it. Where the
/// two read the same text differently it is rewritten (`\s`, `\w`, properties by their Unicode version) or,
/// where that can't be said in PCRE2, refused: throws ConfigError with the pattern, the place and the reason.
std::string translate_oniguruma(const std::string& pattern);

}  // namespace titan::data
