#include "ops/saved_outputs.h"

namespace titan::ops {

namespace {
thread_local SavedOutputs* current_outputs = nullptr;
thread_local bool tensors_are_dropped = false;
}  // namespace

SavedOutputs* SavedOutputs::current() { return current_outputs; }

ScopedSavedOutputs::ScopedSavedOutputs(SavedOutputs* outputs)
    : previous_(std::exchange(current_outputs, outputs)) {}

ScopedSavedOutputs::~ScopedSavedOutputs() { current_outputs = previous_; }

bool saved_tensors_are_dropped() { return tensors_are_dropped; }

ScopedDroppedTensors::ScopedDroppedTensors(bool dropped)
    : previous_(std::exchange(tensors_are_dropped, dropped)) {}

ScopedDroppedTensors::~ScopedDroppedTensors() { tensors_are_dropped = previous_; }

}  // namespace titan::ops
