#include "cli/launch/places.h"

#include <algorithm>
#include <filesystem>
#include <sstream>
#include <utility>

namespace titan::cli {

using std::chrono::milliseconds;
using std::chrono::seconds;

namespace {
constexpr int kMostDoubled = 64;
}

RankPlaces::RankPlaces(Options options)
    : options_(std::move(options)),
      free_at_(options_.num_places, Time::min()),
      absences_(options_.num_places, milliseconds(0)) {}

void RankPlaces::lose(int place, Time now) {
  if (options_.min_ranks >= options_.num_places) return;
  if (!options_.rejoin_after) {
    free_at_[place] = Time::max();
    return;
  }
  milliseconds& absence = absences_[place];
  const bool comes_again = absence.count() > 0 && now < free_at_[place] + absence;
  absence =
      comes_again ? std::min(2 * absence, kMostDoubled * *options_.rejoin_after) : *options_.rejoin_after;
  free_at_[place] = now + absence;
}

void RankPlaces::bring_back() {
  std::fill(free_at_.begin(), free_at_.end(), Time::min());
  std::fill(absences_.begin(), absences_.end(), milliseconds(0));
}

int RankPlaces::largest_fit(int num_free) const {
  for (int size = num_free; size >= options_.min_ranks; --size)
    if (!options_.fits || options_.fits(size)) return size;
  return 0;
}

std::vector<int> RankPlaces::available(Time now) const {
  std::vector<int> places;
  for (int place = 0; place < options_.num_places; ++place)
    if (free_at_[place] <= now) places.push_back(place);
  places.resize(largest_fit(static_cast<int>(places.size())));
  return places;
}

std::optional<RankPlaces::Time> RankPlaces::next_growth(int size) const {
  std::vector<Time> times = free_at_;
  std::sort(times.begin(), times.end());
  for (int num_free = size + 1; num_free <= options_.num_places; ++num_free) {
    const Time time = times[num_free - 1];
    if (time == Time::max()) break;
    if (largest_fit(num_free) > size) return time;
  }
  return std::nullopt;
}

milliseconds restart_delay(int num_short_runs, milliseconds longest) {
  if (num_short_runs <= 1) return milliseconds(0);
  return std::min<milliseconds>(longest, seconds(1 << std::min(num_short_runs - 2, 20)));
}

namespace {

std::vector<std::string> device_names(const std::optional<std::string>& visible, int num_devices) {
  std::vector<std::string> names;
  if (!visible) {
    for (int device = 0; device < num_devices; ++device) names.push_back(std::to_string(device));
    return names;
  }
  std::istringstream list(*visible);
  for (std::string name; std::getline(list, name, ',');) names.push_back(name);
  return names;
}

}  // namespace

std::optional<std::string> devices_of_places(const std::vector<int>& places, int num_places,
                                             const std::optional<std::string>& visible, int num_devices) {
  const std::vector<std::string> names = device_names(visible, num_devices);
  if (static_cast<int>(places.size()) == num_places || static_cast<int>(names.size()) < num_places) return {};
  std::string list;
  for (int place : places) list += (list.empty() ? "" : ",") + names[place];
  return list;
}

int num_gpus_of_host() {
  std::error_code none;
  std::filesystem::directory_iterator gpus("/proc/driver/nvidia/gpus", none);
  return none ? 0 : static_cast<int>(std::distance(begin(gpus), end(gpus)));
}

}  // namespace titan::cli
