#pragma once

/// Registers the model "ngram" and the parallelism plan "keep_gathered".
void register_ngram();
