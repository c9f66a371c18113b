#pragma once

/// Makes the model "ngram" known to `titan train`.
void register_ngram();
