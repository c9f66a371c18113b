#pragma once

#include <string>

namespace titan::testing {

/// If `word` is --file=NAME, runs only those cases that --gtest_filter chooses and NAME.cpp defines. Ends the program with an error if there are
/// no cases in such a file. After InitGoogleTest.
void choose_file(const std::string& word);

}  // namespace titan::testing
