#include "titan/ops/saved_outputs.h"

namespace titan::ops {

namespace {
thread_local SavedOutputs* current_outputs = nullptr;
}

SavedOutputs* SavedOutputs::current() { return current_outputs; }

ScopedSavedOutputs::ScopedSavedOutputs(SavedOutputs* outputs)
    : previous_(std::exchange(current_outputs, outputs)) {}

ScopedSavedOutputs::~ScopedSavedOutputs() { current_outputs = previous_; }

}  // namespace titan::ops
