#include "plan/device_file.h"

#include <algorithm>
#include <filesystem>
#include <utility>
#include <vector>

#include <c10/util/StringUtil.h>

#include "config/document.h"
#include "core/file.h"
#include "titan/config/table.h"
#include "titan/core/error.h"

namespace titan::plan {

namespace {

namespace fs = std::filesystem;

/// Reads keys of a file, and collects what is wrong with them.
class Keys {
 public:
  /// `name`: what to call the table in messages.
  Keys(const std::vector<config::Leaf>& leaves, std::string name, std::string file,
       std::vector<std::string>& problems)
      : leaves_(leaves), name_(std::move(name)), file_(std::move(file)), problems_(problems) {}

  void number(const std::string& key, double& value, double lowest, double highest) {
    const config::Leaf* leaf = find(key);
    const std::string range = str("a number from ", lowest, " to ", highest);
    if (!leaf) return missing(key, range);
    if (const auto* real = std::get_if<double>(&leaf->value.value))
      value = *real;
    else if (const auto* whole = std::get_if<int64_t>(&leaf->value.value))
      value = static_cast<double>(*whole);
    else
      return wrong(*leaf, range);
    if (!(value >= lowest && value <= highest)) wrong(*leaf, range);
  }
  void number(const std::string& key, int64_t& value, int64_t lowest, int64_t highest) {
    const config::Leaf* leaf = find(key);
    const std::string range = str("an integer from ", lowest, " to ", highest);
    if (!leaf) return missing(key, range);
    const auto* whole = std::get_if<int64_t>(&leaf->value.value);
    if (!whole || *whole < lowest || *whole > highest) return wrong(*leaf, range);
    value = *whole;
  }
  void text(const std::string& key, std::string& value, const std::vector<std::string>& allowed = {}) {
    const config::Leaf* leaf = find(key);
    const std::string what = allowed.empty() ? "a text" : "one of " + c10::Join(", ", allowed);
    if (!leaf) return missing(key, what);
    const auto* text = std::get_if<std::string>(&leaf->value.value);
    if (!text || text->empty() || (!allowed.empty() && std::ranges::find(allowed, *text) == allowed.end()))
      return wrong(*leaf, what);
    value = *text;
  }
  /// Whether the key is there.
  bool has(const std::string& key) { return find(key) != nullptr; }

  /// The keys that nothing asked for.
  void check_unknown() {
    for (const config::Leaf& leaf : leaves_)
      if (std::ranges::find(known_, leaf.name) == known_.end())
        problems_.push_back(
            str(to_text(leaf.place), ": unknown key ", full(leaf.name), did_you_mean(leaf.name, known_)));
  }

 private:
  const config::Leaf* find(const std::string& key) {
    if (std::ranges::find(known_, key) == known_.end()) known_.push_back(key);
    const auto found = std::ranges::find(leaves_, key, &config::Leaf::name);
    return found == leaves_.end() ? nullptr : &*found;
  }
  std::string full(const std::string& key) const { return name_.empty() ? key : name_ + "." + key; }
  void missing(const std::string& key, const std::string& what) {
    problems_.push_back(str(file_, ": ", full(key), " is missing; it must be ", what));
  }
  void wrong(const config::Leaf& leaf, const std::string& what) {
    problems_.push_back(
        str(to_text(leaf.place), ": ", full(leaf.name), " = ", to_text(leaf.value), " must be ", what));
  }

  const std::vector<config::Leaf>& leaves_;
  std::string name_, file_;
  std::vector<std::string>& problems_;
  std::vector<std::string> known_;
};

constexpr double kMost = 1e9;  // the largest speed or time
constexpr int64_t kLongest = int64_t{1} << 24;
const std::vector<std::string> kDtypes = {"bfloat16", "float8", "float32"};

void read_device(Keys& keys, DeviceSpec& device, std::vector<std::string>& assumed) {
  const auto number_of_h100 = [&](const std::string& key, int64_t& value, int64_t lowest, int64_t highest) {
    if (keys.has(key))
      keys.number(key, value, lowest, highest);
    else
      assumed.push_back(str(key, " = ", value));
  };
  keys.text("device.name", device.name);
  if (std::string kind; keys.has("device.kind")) {
    keys.text("device.kind", kind, {"gpu", "cpu"});
    device.is_cpu = kind == "cpu";
  }
  keys.number("device.memory_gib", device.memory_gib, device.is_cpu ? 0.01 : 1.0, 4096.0);
  number_of_h100("device.compute_capability", device.compute_capability, 70, 999);
  number_of_h100("device.multiprocessors", device.multiprocessors, 1, 1024);
  keys.number("device.memory_gb_per_s", device.memory_gb_per_s, 1e-3, kMost);
  keys.number("device.launch_us", device.launch_us, 0.0, kMost);
  if (keys.has("device.power")) keys.number("device.power", device.power, 0.01, 1.0);
  if (keys.has("device.alone")) keys.number("device.alone", device.alone, 1.0, 65536.0);
  for (const std::string& dtype : kDtypes)
    if (const std::string key = "device.tflops." + dtype; keys.has(key))
      keys.number(key, device.tflops[dtype], 1e-6, kMost);
}

void read_point(Keys& keys, DeviceSpec::ProductPoint& point) {
  keys.text("dtype", point.dtype, kDtypes);
  keys.number("m", point.m, 1, kLongest);
  keys.number("n", point.n, 1, kLongest);
  keys.number("k", point.k, 1, kLongest);
  keys.number("share", point.share, 1e-6, 1.0);
}

void read_point(Keys& keys, DeviceSpec::AttentionPoint& point) {
  keys.number("sequence", point.sequence, 1, kLongest);
  keys.number("forward", point.forward, 1e-6, 1.0);
  keys.number("backward", point.backward, 1e-6, 1.0);
  if (keys.has("kernel")) keys.text("kernel", point.kernel, {"cudnn", "flash"});
  if (keys.has("features")) keys.number("features", point.features, 1, kLongest);
}

template <class Point>
std::vector<Point> read_points(const config::Document& document, const std::string& name,
                               const std::string& file, std::vector<std::string>& problems) {
  std::vector<Point> points;
  for (const config::Row& row : document.rows) {
    if (row.name != name) continue;
    Keys keys(row.leaves, name, file, problems);
    read_point(keys, points.emplace_back());
    keys.check_unknown();
  }
  return points;
}

ClusterSpec read_cluster(const config::Document& document, const std::string& file,
                         std::vector<std::string>& problems) {
  ClusterSpec cluster;
  Keys keys(document.leaves, "", file, problems);
  read_device(keys, cluster.device, cluster.assumed);
  keys.number("host.devices", cluster.host.devices, 1, 65536);
  keys.number("host.gb_per_s", cluster.host.gb_per_s, 1e-6, kMost);
  keys.number("host.latency_us", cluster.host.latency_us, 0.0, kMost);
  if (keys.has("host.pcie_gb_per_s"))
    keys.number("host.pcie_gb_per_s", cluster.host.pcie_gb_per_s, 1e-6, kMost);
  else if (!cluster.device.is_cpu)
    cluster.assumed.push_back(str("host.pcie_gb_per_s = ", cluster.host.pcie_gb_per_s));
  if (cluster.device.is_cpu && (keys.has("host.late_share") || keys.has("host.late_us"))) {
    keys.number("host.late_share", cluster.host.late_share, 0.0, 100.0);
    keys.number("host.late_us", cluster.host.late_us, 0.0, kMost);
  }
  keys.number("network.gb_per_s", cluster.network.gb_per_s, 1e-6, kMost);
  keys.number("network.latency_us", cluster.network.latency_us, 0.0, kMost);
  // Their rows are read one by one.
  for (const char* key : {"device.efficiency", "device.attention"})
    if (keys.has(key) && std::ranges::find(document.rows, key, &config::Row::name) == document.rows.end())
      problems.push_back(str(file, ": ", key, " must be tables: [[", key, "]]"));
  if (!cluster.device.tflops.contains("bfloat16"))
    problems.push_back(str(file, ": device.tflops.bfloat16 is missing; MFU is against it"));
  keys.check_unknown();
  cluster.device.efficiency =
      read_points<DeviceSpec::ProductPoint>(document, "device.efficiency", file, problems);
  cluster.device.attention =
      read_points<DeviceSpec::AttentionPoint>(document, "device.attention", file, problems);
  if (cluster.device.is_cpu) return cluster;
  if (cluster.device.efficiency.empty())
    cluster.assumed.emplace_back("device.efficiency: products are as fast as whole tiles allow");
  if (cluster.device.attention.empty())
    cluster.assumed.emplace_back("device.attention: as fast as products of the same size");
  return cluster;
}

// The source tree's, from its root or from its build folder; and the installed ones.
std::vector<fs::path> folders() {
  std::error_code ignored;
  const fs::path program = fs::read_symlink("/proc/self/exe", ignored).parent_path();
  return {fs::path("configs/devices"), program / "../../configs/devices", program / "../share/titan/devices"};
}

std::vector<std::string> known_names() {
  for (const fs::path& folder : folders()) {
    std::vector<std::string> names;
    std::error_code error;
    for (const fs::directory_entry& entry : fs::directory_iterator(folder, error))
      if (entry.path().extension() == ".toml") names.push_back(entry.path().stem());
    std::ranges::sort(names);
    if (!names.empty()) return names;
  }
  return {};
}

fs::path file_of(const std::string& name) {
  std::error_code ignored;
  if (name.ends_with(".toml")) {
    if (fs::exists(name, ignored)) return name;
    throw ConfigError(str("--device ", name, ": there is no such file"));
  }
  for (const fs::path& folder : folders())
    if (const fs::path file = folder / (name + ".toml"); fs::exists(file, ignored)) return file;
  const std::vector<std::string> known = known_names();
  throw ConfigError(str("--device ", name, ": unknown device; known: ", c10::Join(", ", known),
                        ", or a .toml file", did_you_mean(name, known)));
}

}  // namespace

ClusterSpec load_device(const std::string& name) {
  const std::string file = file_of(name).string();
  std::vector<std::string> problems;
  ClusterSpec cluster = read_cluster(config::read_toml(read_file(file), file), file, problems);
  if (!problems.empty()) throw ConfigError(std::move(problems));
  return cluster;
}

std::optional<std::string> device_called(const std::string& driver_name) {
  for (const std::string& name : known_names())
    if (load_device(name).device.name == driver_name) return name;
  return std::nullopt;
}

std::string to_toml(const ClusterSpec& cluster) {
  const DeviceSpec& device = cluster.device;
  const auto text_of = [](const config::Value& value) { return config::to_text(value); };
  std::string text = str(
      "[device]\nname = ", config::quoted(device.name), device.is_cpu ? "\nkind = \"cpu\"" : "",
      "\nmemory_gib = ", text_of(device.memory_gib), "\ncompute_capability = ", device.compute_capability,
      "\nmultiprocessors = ", device.multiprocessors, "\nmemory_gb_per_s = ", text_of(device.memory_gb_per_s),
      "\nlaunch_us = ", text_of(device.launch_us), "\npower = ", text_of(device.power),
      "\nalone = ", text_of(device.alone), "\n\n[device.tflops]\n");
  for (const auto& [dtype, tflops] : device.tflops) text += str(dtype, " = ", text_of(tflops), "\n");
  for (const DeviceSpec::ProductPoint& point : device.efficiency)
    text += str("\n[[device.efficiency]]\ndtype = ", config::quoted(point.dtype), "\nm = ", point.m,
                "\nn = ", point.n, "\nk = ", point.k, "\nshare = ", text_of(point.share), "\n");
  for (const DeviceSpec::AttentionPoint& point : device.attention)
    text += str("\n[[device.attention]]\nsequence = ", point.sequence, "\nforward = ", text_of(point.forward),
                "\nbackward = ", text_of(point.backward), "\n",
                point.kernel.empty() ? "" : "kernel = " + config::quoted(point.kernel) + "\n",
                point.features == 128 ? "" : str("features = ", point.features, "\n"));
  const bool knows_pcie =
      !device.is_cpu && std::ranges::none_of(cluster.assumed, [](const std::string& assumed) {
        return assumed.starts_with("host.pcie_gb_per_s");
      });
  return text + str("\n[host]\ndevices = ", cluster.host.devices,
                    "\ngb_per_s = ", text_of(cluster.host.gb_per_s),
                    "\nlatency_us = ", text_of(cluster.host.latency_us),
                    knows_pcie ? str("\npcie_gb_per_s = ", text_of(cluster.host.pcie_gb_per_s)) : "",
                    device.is_cpu ? str("\nlate_share = ", text_of(cluster.host.late_share),
                                        "\nlate_us = ", text_of(cluster.host.late_us))
                                  : "",
                    "\n\n[network]\ngb_per_s = ", text_of(cluster.network.gb_per_s),
                    "\nlatency_us = ", text_of(cluster.network.latency_us), "\n");
}

}  // namespace titan::plan
