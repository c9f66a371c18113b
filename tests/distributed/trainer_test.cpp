// The training loop itself, with a model small enough to be followed: what it logs, when it ends, what it
// refuses.

#include <limits>
#include <map>

#include <gtest/gtest.h>

#include "distributed/world.h"
#include "titan/core/error.h"
#include "titan/data/byte_tokenizer.h"
#include "titan/data/packed_feed.h"
#include "titan/train/trainer.h"
#include "unit/data/fake_source.h"
#include "unit/train/toy_model.h"

namespace titan::train {
namespace {

using titan::testing::world;

constexpr int64_t kVocabSize = 258;
constexpr int64_t kRows = 6;
constexpr int64_t kSeqLen = 8;

// The rank whose numbers go wrong: one in the middle, where there are three.
int bad_rank() { return world().size() / 2; }

// What is wrong, at every step.
enum class Fault { None, InfiniteLoss, InfiniteGradient };

class FaultyModel : public BigramModel {
 public:
  FaultyModel(const nn::Construct& construct, Fault fault)
      : BigramModel(kVocabSize, construct), fault_(fault) {}

  at::Tensor loss(const at::Tensor& tokens_BS, const at::Tensor& labels_BS, int64_t global_count) override {
    at::Tensor loss = BigramModel::loss(tokens_BS, labels_BS, global_count);
    if (world().rank() != bad_rank()) return loss;
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    if (fault_ == Fault::InfiniteLoss) return loss * kInfinity;
    if (fault_ == Fault::InfiniteGradient)
      loss.register_hook([](at::Tensor grad) { return grad * kInfinity; });
    return loss;
  }

 private:
  Fault fault_;
};

struct Job {
  Fault fault = Fault::None;
  std::shared_ptr<const data::Feed> feed;  // unset: documents without end
  TrainerOptions options;
  std::filesystem::path folder;  // of rank 0's metrics; empty: none
};

std::shared_ptr<const data::Feed> documents() {
  return std::make_shared<data::PackedFeed>(std::make_shared<data::FakeSource>(data::numbered_documents(20)),
                                            std::make_shared<data::ByteTokenizer>(), data::PackingOptions{});
}

// A trainer, and the weights it began with.
struct Started {
  Trainer trainer;
  std::vector<Parameter> parameters;
  std::map<std::string, at::Tensor> before;

  bool weights_are_unchanged() const {
    for (const Parameter& parameter : parameters)
      if (!at::equal(parameter.data.local.detach(), before.at(parameter.name))) return false;
    return true;
  }
};

std::unique_ptr<TrainableModel> build_model(const Meshes& meshes, Fault fault) {
  auto model = std::make_unique<FaultyModel>(deferred(at::kCPU, at::kFloat), fault);
  fully_shard(model->model, {.mesh = meshes.fsdp});
  materialize(model->root(), 1);
  return model;
}

data::DataLoader build_loader(const Job& job, const Meshes& meshes) {
  return {job.feed ? job.feed : documents(),
          {.dp_rank = meshes.dp_rank(),
           .dp_size = meshes.dp_degree(),
           .global_batch_size = kRows,
           .local_batch_size = kRows / world().size(),
           .seq_len = kSeqLen}};
}

std::unique_ptr<MetricsLogger> build_logger(const Job& job) {
  const bool writes = world().rank() == 0 && !job.folder.empty();
  return std::make_unique<MetricsLogger>(
      MetricsLogger::Options{.settings = {}, .folder = job.folder, .writes = writes});
}

Started start(const Job& job) {
  Meshes meshes = build_meshes(world(), {.dp_shard = world().size()});
  auto model = build_model(meshes, job.fault);
  auto list = titan::parameters(model->root());
  std::map<std::string, at::Tensor> before;
  for (const Parameter& parameter : list) before[parameter.name] = parameter.data.local.detach().clone();
  return {Trainer({.world = world(),
                   .meshes = meshes,
                   .device = at::kCPU,
                   .model = std::move(model),
                   .parameters = list,
                   .optimizer = optim::Optimizer(list, {.lr = 0.1}),
                   .schedule = optim::LrSchedule({.warmup_steps = 2}, job.options.steps),
                   .loader = build_loader(job, meshes),
                   .logger = build_logger(job),
                   .window = MetricsWindow(at::kCPU, {}),
                   .validator = {}},
                  job.options),
          list, std::move(before)};
}

std::string message_of_training(Trainer& trainer) {
  try {
    trainer.train();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != text.npos; }

TEST(Trainer, StepsChangeTheWeights) {
  Started job = start({.options = {.steps = 2}});
  job.trainer.train();
  EXPECT_FALSE(job.weights_are_unchanged());
}

// Its peers' gradients are infinite too, as soon as they are reduced: only the loss tells whose it is.
TEST(Trainer, AnInfiniteLossIsToldByAllRanksWithItsRank) {
  Started job = start({.fault = Fault::InfiniteLoss, .options = {.steps = 2}});
  std::string message = message_of_training(job.trainer);
  EXPECT_TRUE(contains(message, str("step 1: the loss isn't finite on rank ", bad_rank()))) << message;
  EXPECT_EQ(contains(message, "(inf)"), world().rank() == bad_rank()) << message;
  EXPECT_TRUE(job.weights_are_unchanged());
}

// It is in every shard of the sum, so the name is the first shard's.
TEST(Trainer, AnInfiniteGradientIsToldByAllRanksWithItsShard) {
  Started job = start({.fault = Fault::InfiniteGradient, .options = {.steps = 2}});
  std::string message = message_of_training(job.trainer);
  EXPECT_TRUE(contains(message, "the losses of all ranks are; first seen in the shard of rank 0")) << message;
  EXPECT_TRUE(job.weights_are_unchanged());
}

}  // namespace
}  // namespace titan::train
