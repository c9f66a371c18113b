#pragma once

// Why a rank failed: which rank is lost, or what the flight records say, and who failed first.

#include <filesystem>
#include <string>

#include "guard/mail.h"

namespace titan::dist {

/// Begins the reason of records that are written because a rank failed.
inline constexpr const char* kFailureOf = "failure of ";

/// What a rank that fails knows.
struct FailureScene {
  int rank = 0, size = 1;
  std::string failure;  ///< one line
  Mail::Connect connect;
  std::filesystem::path records;  ///< folder of the flight records; empty: none are written
  std::string first_rank_life;    ///< what rank 0, whose process may keep the store, said last; may be empty
};

/// The same line on all ranks that fail. Blocks as long as the store does; otherwise returns within
/// kExplainsWithin.
std::string explain_failure(const FailureScene& scene);

/// The line of a rank that cannot ask the others: `known` says why.
std::string explain_alone(const FailureScene& scene, const std::string& known);

}  // namespace titan::dist
