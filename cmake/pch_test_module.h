#pragma once

// For tests that define modules.

#include "pch_test.h"

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
