#pragma once

/// Makes the model "ngram" and the parallelism plan "keep_gathered" known to `titan train`.
void register_ngram();
