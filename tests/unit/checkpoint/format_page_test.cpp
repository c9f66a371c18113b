// The program in docs/checkpoint_format.md reads the checkpoints that we write.

#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "checkpoint/format/rank_file.h"
#include "core/file.h"
#include "titan/checkpoint/manifest.h"
#include "titan/core/error.h"
#include "unit/checkpoint/temp_folder.h"

namespace titan::checkpoint {
namespace {

using titan::testing::TempFolder;

constexpr int64_t kRanks = 8;

std::shared_ptr<const TensorLayout> layout(std::vector<LayoutAxis> axes) {
  return std::make_shared<const TensorLayout>(TensorLayout{std::move(axes)});
}

// A tensor that is split twice, one whose copies share the writing, a scalar on one stage, and an empty one.
StateTable sample_table() {
  const LayoutAxis stage{.name = "pp", .size = 2, .stride = 4, .only = 1};
  const LayoutAxis columns{.name = "tp", .size = 2, .stride = 1, .dim = 1};
  const LayoutAxis rows{.name = "fsdp", .size = 2, .stride = 2, .dim = 0};
  return StateTable(
      {{.name = "model.cut",
        .dtype = at::kBFloat16,
        .shape = {7, 5},
        .layout = layout({stage, columns, rows})},
       {.name = "model.shared", .dtype = at::kFloat, .shape = {5, 300'000}, .layout = layout({rows})},
       {.name = "optimizer.step", .dtype = at::kFloat, .shape = {}, .layout = layout({stage})},
       {.name = "model.empty", .dtype = at::kFloat, .shape = {0, 3}, .layout = layout({rows})}},
      kRanks);
}

at::Tensor within(at::Tensor tensor, const Box& box) {
  for (size_t dim = 0; dim < box.offset.size(); ++dim)
    tensor = tensor.narrow(static_cast<int64_t>(dim), box.offset[dim], box.length[dim]);
  return tensor.contiguous();
}

std::map<std::string, at::Tensor> write_checkpoint(const std::filesystem::path& folder) {
  Manifest manifest{.run_id = digest_of("run"), .table = sample_table()};
  std::map<std::string, at::Tensor> tensors;
  for (const StateTensor& tensor : manifest.table.tensors())
    tensors[tensor.name] = at::randn(tensor.shape).to(tensor.dtype);
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    std::vector<PieceToWrite> pieces;
    for (const Piece& piece : manifest.table.pieces_of(rank)) {
      const std::string& name = manifest.table.tensors()[piece.tensor].name;
      pieces.push_back({name, piece.box, within(tensors.at(name), piece.box)});
    }
    const FileIdentity identity{manifest.run_id, manifest.step, rank, kRanks};
    manifest.files.push_back(write_rank_file(folder / file_name(rank), identity, pieces).record);
  }
  write_file_atomic(folder / kManifestName, to_text(manifest));
  return tensors;
}

std::string program_of_page() {
  const std::string page =
      read_file(std::filesystem::path(TITAN_SOURCE_DIR) / "docs" / "checkpoint_format.md");
  const std::string begin = "```python\n";
  const size_t start = page.find(begin) + begin.size();
  return page.substr(start, page.find("```", start) - start);
}

std::string string_of(const at::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
}

TEST(FormatPage, ItsProgramReadsEveryTensor) {
  const auto python = std::filesystem::path(TITAN_SOURCE_DIR) / ".venv" / "bin" / "python";
  if (std::system((python.string() + " -c 'import safetensors' 2>/dev/null").c_str()) != 0)
    GTEST_SKIP() << "needs the Python package safetensors (scripts/bootstrap.sh installs it)";
  TempFolder folder;
  std::filesystem::create_directory(folder / "step-0");
  const auto tensors = write_checkpoint(folder / "step-0");
  std::ofstream(folder / "page.py") << program_of_page();
  std::ofstream(folder / "test.py") << R"(
import pathlib, sys
import torch
from page import load_tensor
for name in sys.argv[2:]:
    tensor = load_tensor(pathlib.Path(sys.argv[1]), name)
    print(name, list(tensor.shape), flush=True)
    tensor.reshape(-1).view(torch.uint8).numpy().tofile(name)
)";
  std::string command = str("cd ", folder.path().string(), " && PYTHONDONTWRITEBYTECODE=1 ", python.string(),
                            " test.py step-0");
  for (const auto& [name, tensor] : tensors) command += " " + name;
  ASSERT_EQ(std::system((command + " > shapes").c_str()), 0);
  std::istringstream shapes(read_file(folder / "shapes"));
  for (const auto& [name, tensor] : tensors) {
    std::string line;
    std::getline(shapes, line);
    std::ostringstream expected;
    expected << name << ' ' << tensor.sizes();
    EXPECT_EQ(line, expected.str());
    EXPECT_TRUE(read_file(folder / name) == string_of(tensor)) << name;
  }
}

}  // namespace
}  // namespace titan::checkpoint
