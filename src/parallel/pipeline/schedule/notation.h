#pragma once

// The words of TorchTitan's and PyTorch's notation for actions: stage, word, micro-batch, as in 3F7.

#include <optional>
#include <string_view>

#include "titan/parallel/pipeline_schedule.h"

namespace titan::pipeline {

constexpr int kNumKinds = static_cast<int>(Action::Kind::Reduce) + 1;

/// "F", "SEND_B", "REDUCE_GRAD"; "?" for a value outside the enumeration.
std::string_view word_of(Action::Kind kind);

/// Reads one action; nothing for any other text.
std::optional<Action> parse_action(std::string_view text);

}  // namespace titan::pipeline
