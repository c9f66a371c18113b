// Your own training loop: an ordinary LibTorch module, generated data, FSDP, AdamW and checkpoints. The
// losses are the same on any number of ranks. A run resumes from the newest checkpoint in FOLDER:
//   titan launch -n 2 -- ./custom_trainer FOLDER
#include <cstdio>
#include <filesystem>

#include <ATen/ATen.h>
#include <titan/titan.h>
#include <torch/nn/modules/linear.h>

// Hooked lets fully_shard wrap LibTorch's own layers. Call them through Ref.
using Linear = titan::nn::Ref<titan::nn::Hooked<torch::nn::LinearImpl>>;

class MlpImpl : public titan::nn::Module {
 public:
  MlpImpl(int64_t dim, int64_t hidden) : up(dim, hidden), down(hidden, 1) {
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) { return down(at::gelu(up(x))); }
  Linear up, down;
};
TITAN_MODULE(Mlp);

int main(int argc, char** argv) try {
  const titan::dist::World world = titan::dist::init();  // torchrun, SLURM, MPI or titan launch: same code
  const auto mesh = titan::DeviceMesh::create(world, {{"dp_shard", -1}});

  at::manual_seed(0);  // all ranks draw the same weights; fully_shard keeps this rank's part
  Mlp model(16, 64);
  model->to(world.device());  // a GPU if one is visible
  const titan::FsdpOptions fsdp{.mesh = mesh["dp_shard"]};
  titan::fully_shard(model->up, fsdp);
  titan::fully_shard(model->down, fsdp);
  titan::fully_shard(model, fsdp);

  titan::optim::Optimizer optimizer(titan::parameters(model), {.lr = 1e-2});
  const auto group = mesh.group();
  const int64_t batch = 48;

  int64_t step = 0;  // steps taken
  titan::train::ModelState model_state(titan::parameters(model));
  titan::train::OptimizerState optimizer_state(optimizer, titan::parameters(model));
  const auto set_step = [&](const std::string& text) { step = std::stoll(text); };
  titan::train::TextState progress([&] { return std::to_string(step); }, set_step);
  const std::filesystem::path folder = argc > 1 ? argv[1] : "checkpoints";
  using titan::checkpoint::AsyncMode;
  titan::checkpoint::Checkpointer checkpoints(world, {}, {.folder = folder, .async = AsyncMode::Staged});
  checkpoints.add("model", model_state);
  checkpoints.add("optimizer", optimizer_state);
  checkpoints.add("progress", progress);
  std::vector<std::string> problems;
  const auto newest = titan::checkpoint::newest_complete(folder, problems);
  if (newest) checkpoints.load(titan::checkpoint::step_path(folder, *newest));

  while (step < 50) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(++step);  // the same data in every run
    // Every rank draws the global batch and computes its own rows. The ranks' losses add up to the mean.
    const at::Tensor x = at::randn({batch, 16}, generator);
    const at::Tensor mine = at::arange(world.rank(), batch, world.size());
    const at::Tensor rows = x.index_select(0, mine).to(world.device());
    const at::Tensor labels = (rows.square().sum(1, true) - 16) / 8;
    at::Tensor loss = (model(rows) - labels).square().sum() / batch;

    optimizer.zero_grad();
    loss.backward();
    const auto norm = titan::optim::clip_grad_norm(titan::parameters(model), 1.0);
    checkpoints.wait_for_staging();
    optimizer.step();
    if (step % 20 == 0) checkpoints.save(step);

    const double total = group->sum(loss.item<double>(), {"example::loss"});
    if (world.rank() == 0 && step % 10 == 0)
      std::printf("step %d  loss %.6f  grad_norm %.4f\n", int(step), total, norm.norm);
  }
  checkpoints.finish();
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
