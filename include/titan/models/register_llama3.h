#pragma once

namespace titan::models {

/// Adds "llama3" to the trainer's models; once per process.
void register_llama3();

}  // namespace titan::models
