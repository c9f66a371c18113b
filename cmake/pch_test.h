#pragma once

// For tests that handle tensors but define no modules.

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
