#pragma once

// For the tests.

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
