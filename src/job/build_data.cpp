// From settings to data: tokenizer, training and validation batches.

#include "job/build.h"
#include "titan/data/feed.h"
#include "train/policies/validation.h"

namespace titan::train {

namespace {

// What training and validation need from the loader.
struct LoaderRequest {
  std::string dataset;
  std::optional<std::string> dataset_path;
  std::shared_ptr<const data::Tokenizer> tokenizer;
  bool repeat = true;
  data::LoaderOptions options;
};

data::DataSettings data_settings(const JobConfig& config) {
  data::DataSettings settings = config.data;
  if (!settings.seed) settings.seed = config.debug.seed;
  return settings;
}

data::DataLoader build_loader(const JobConfig& config, const LoaderRequest& request) {
  data::FeedRequest feed;
  feed.dataset = request.dataset;
  feed.model_vocab_size = config.spec().sizes(config.args()).vocab_size;
  feed.repeat = request.repeat;
  feed.source = {request.dataset_path.value_or(""), data_settings(config),
                 config.data.cache_folder.empty()
                     ? std::filesystem::path(config.job.dump_folder) / "data_cache"
                     : std::filesystem::path(config.data.cache_folder)};
  if (request.dataset != "tokens") feed.tokenizer = request.tokenizer;
  return data::DataLoader(data::build_feed(feed), request.options);
}

// A copy from pageable memory would make the host wait for the GPU.
data::DataloaderSettings settings_on(const Meshes& meshes, data::DataloaderSettings settings) {
  settings.pin_memory = settings.pin_memory || meshes.world.world().device().is_cuda();
  return settings;
}

}  // namespace

std::shared_ptr<const data::Tokenizer> build_job_tokenizer(const JobConfig& config,
                                                           const CheckedFiles& checked) {
  const bool training_reads_text = config.training.dataset != "tokens";
  const bool validation_reads_text = config.validation.enable && config.validation.dataset != "tokens";
  if (checked.tokenizer || !(training_reads_text || validation_reads_text)) return checked.tokenizer;
  return data::build_tokenizer(config.model.hf_assets_path);
}

data::DataLoader build_training_loader(const JobConfig& config, const Meshes& meshes,
                                       const std::shared_ptr<const data::Tokenizer>& tokenizer) {
  const TrainingSettings& training = config.training;
  return build_loader(config, {.dataset = training.dataset,
                               .dataset_path = training.dataset_path,
                               .tokenizer = tokenizer,
                               .options = {.dp_rank = meshes.dp_rank(),
                                           .dp_size = meshes.dp_degree(),
                                           .global_batch_size = training.global_batch_size,
                                           .local_batch_size = training.local_batch_size,
                                           .seq_len = training.seq_len,
                                           .settings = settings_on(meshes, training.dataloader)}});
}

std::unique_ptr<TrainerPolicy> build_validation(const JobConfig& config, const Meshes& meshes,
                                                const std::shared_ptr<const data::Tokenizer>& tokenizer) {
  const ValidationSettings& validation = config.validation;
  if (!validation.enable) return nullptr;
  return std::make_unique<Validation>(
      validation,
      build_loader(config, {.dataset = validation.dataset,
                            .dataset_path = validation.dataset_path,
                            .tokenizer = tokenizer,
                            .repeat = false,
                            .options = {.dp_rank = meshes.dp_rank(),
                                        .dp_size = meshes.dp_degree(),
                                        .global_batch_size = validation.global_batch_size,
                                        .local_batch_size = validation.local_batch_size,
                                        .seq_len = validation.seq_len,
                                        .settings = settings_on(meshes, validation.dataloader)}}));
}

}  // namespace titan::train
