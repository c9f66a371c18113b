// Speed of Float8 casts on a CPU, compared with the same casts in LibTorch's operations and with a plain
// copy.
//
//   float8_bench [--rows N] [--columns N] [--dtype float32|bfloat16] [--runs N] [--threads N]
//
// Prints one JSON object with an object for each step of a cast: nanoseconds per byte read, for LibTitan's
// pass and for LibTorch's composition (medians over interleaved runs); how many times as fast LibTitan's is;
// and its speed as a share of a copy's, in bytes read and written per second.

#include <algorithm>
#include <chrono>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "float8/cast.h"
#include "titan/core/error.h"

namespace {

using namespace titan;
using float8::Over;

struct Options {
  int64_t rows = 4096, columns = 4096;
  at::ScalarType dtype = at::kBFloat16;
  int runs = 9;
};

Options parse(const std::vector<std::string>& args) {
  Options options;
  TITAN_CHECK(args.size() % 2 == 0, "every option needs a value");
  for (size_t i = 0; i < args.size(); i += 2) {
    const std::string &key = args[i], &value = args[i + 1];
    if (key == "--rows") {
      options.rows = std::stoll(value);
    } else if (key == "--columns") {
      options.columns = std::stoll(value);
    } else if (key == "--dtype") {
      options.dtype = value == "float32" ? at::kFloat : at::kBFloat16;
    } else if (key == "--runs") {
      options.runs = std::stoi(value);
    } else if (key == "--threads") {
      at::set_num_threads(std::stoi(value));
    } else {
      throw Error(titan::str("unknown option ", key));
    }
  }
  return options;
}

double seconds(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Step {
  std::string name;
  double bytes;  // read and written
  std::function<void()> ours, composition;
};

void measure(const Step& step, const Options& options, const at::Tensor& x) {
  at::Tensor copy = at::empty_like(x);
  std::vector<double> ours, composition, copying;
  for (int run = 0; run <= options.runs; ++run) {
    const double times[] = {seconds(step.ours), seconds(step.composition), seconds([&] { copy.copy_(x); })};
    if (run == 0) continue;
    ours.push_back(times[0]);
    composition.push_back(times[1]);
    copying.push_back(times[2]);
  }
  const auto read = static_cast<double>(x.nbytes());
  const double copy_rate = 2 * read / median(copying);
  std::cout << "  \"" << step.name << "\": {\"ns_per_byte\": " << 1e9 * median(ours) / read
            << ", \"libtorch_ns_per_byte\": " << 1e9 * median(composition) / read
            << ", \"times_as_fast\": " << median(composition) / median(ours)
            << ", \"share_of_copy\": " << step.bytes / median(ours) / copy_rate << "}";
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse({argv + 1, argv + argc});
  const at::Tensor x = at::randn({options.rows, options.columns}).to(options.dtype);
  const auto read = static_cast<double>(x.nbytes()), elements = static_cast<double>(x.numel());
  const at::ScalarType to = at::kFloat8_e4m3fn;
  const at::Tensor whole = float8::scale_of(float8::amax(x, Over::Matrix), to, false);
  const at::Tensor rows = float8::scale_of(float8::amax(x, Over::Row), to, true),
                   columns = float8::scale_of(float8::amax(x, Over::Column), to, true);
  namespace composite = float8::composite;
  const std::vector<at::Tensor> weights = x.chunk(64);
  const std::vector<Step> steps = {
      {"amax", read, [&] { float8::amax(x, Over::Matrix); }, [&] { composite::amax(x, std::nullopt); }},
      {"amax of rows", read, [&] { float8::amax(x, Over::Row); }, [&] { composite::amax(x, 1); }},
      {"amax of columns", read, [&] { float8::amax(x, Over::Column); }, [&] { composite::amax(x, 0); }},
      {"cast", read + elements, [&] { float8::cast(x, whole, to, false); },
       [&] { composite::cast(x, whole, to, false); }},
      {"cast by rows", read + elements, [&] { float8::cast(x, rows, to, false); },
       [&] { composite::cast(x, rows, to, false); }},
      {"cast and transpose", read + elements, [&] { float8::cast(x, whole, to, true); },
       [&] { composite::cast(x, whole, to, true); }},
      {"cast by columns and transpose", read + elements, [&] { float8::cast(x, columns, to, true); },
       [&] { composite::cast(x, columns, to, true); }},
      {"cast blocks", read + 33.0 / 32 * elements, [&] { float8::cast_blocks(x, {}); },
       [&] { composite::cast_blocks(x, to, false, false, false); }},
      {"cast blocks and transpose", read + 33.0 / 32 * elements,
       [&] { float8::cast_blocks(x, {.transposed = true}); },
       [&] { composite::cast_blocks(x, to, false, true, false); }},
      {"amax of many", read, [&] { float8::amax_many(weights); }, [&] { composite::amax_many(weights); }},
  };
  std::cout << "{\n";
  for (const Step& step : steps) {
    if (&step != &steps.front()) std::cout << ",\n";
    measure(step, options, x);
  }
  std::cout << "\n}\n";
}
