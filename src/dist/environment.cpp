#include "dist/environment.h"

#include <charconv>
#include <cstdlib>
#include <initializer_list>

#include "titan/core/error.h"

namespace titan::dist {

std::vector<std::string_view> split_list(std::string_view list) {
  std::vector<std::string_view> parts;
  size_t start = 0;
  int depth = 0;
  for (size_t i = 0; i <= list.size(); ++i) {
    if (i == list.size() || (list[i] == ',' && depth == 0)) {
      parts.push_back(list.substr(start, i - start));
      start = i + 1;
    } else if (list[i] == '[') {
      ++depth;
    } else if (list[i] == ']') {
      --depth;
    }
  }
  return parts;
}

namespace {

/// The number, if the whole text is a non-negative one.
template <class Int>
std::optional<Int> number_of(std::string_view text) {
  Int number = 0;
  const char* end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, number);
  if (result.ec != std::errc() || result.ptr != end || number < 0) return {};
  return number;
}

int to_number(std::string_view digits, std::string_view list) {
  if (const auto number = number_of<int>(digits)) return *number;
  throw ConfigError(str("SLURM list '", list, "': '", digits, "' isn't a number"));
}

/// "01-03" -> 01 02 03, as wide as the first bound; "7" -> 7.
void expand_range(std::string_view range, std::string_view list, std::vector<std::string>& out) {
  const size_t dash = range.find('-');
  const std::string_view first = range.substr(0, dash);
  const int low = to_number(first, list);
  const int high = dash == std::string_view::npos ? low : to_number(range.substr(dash + 1), list);
  if (high < low) throw ConfigError(str("SLURM list '", list, "': range '", range, "' runs backwards"));
  for (int number = low; number <= high; ++number) {
    std::string digits = std::to_string(number);
    if (digits.size() < first.size()) digits.insert(0, first.size() - digits.size(), '0');
    out.push_back(digits);
  }
}

/// One name with any number of brackets.
std::vector<std::string> expand(std::string_view name, std::string_view list) {
  const size_t open = name.find('[');
  if (open == std::string_view::npos) return {std::string(name)};
  const size_t close = name.find(']', open);
  if (close == std::string_view::npos) throw ConfigError(str("SLURM list '", list, "': '[' without ']'"));
  std::vector<std::string> numbers, names;
  for (auto range : split_list(name.substr(open + 1, close - open - 1))) expand_range(range, list, numbers);
  const auto tails = expand(name.substr(close + 1), list);
  for (const auto& number : numbers)
    for (const auto& tail : tails) names.push_back(str(name.substr(0, open), number, tail));
  return names;
}

/// The rank and size that one launcher claims, and its variables.
struct Claim {
  std::string by;
  const char* rank_variable;
  const char* size_variable;
  int rank = 0;
  int size = 0;
};

/// Reads variables and gathers all problems for one message.
class Reader {
 public:
  explicit Reader(const Environment& environment) : environment_(environment) {}

  std::optional<std::string> text(const char* name) const { return environment_(name); }
  /// The first of these variables that is set.
  std::optional<std::string> first_of(std::initializer_list<const char*> names) const {
    for (const char* name : names)
      if (auto value = text(name)) return value;
    return {};
  }
  bool has(const char* name) const { return text(name).has_value(); }

  template <class Int = int>
  Int number(const char* name, Int fallback) {
    const auto value = text(name);
    if (!value) return fallback;
    if (const auto number = number_of<Int>(*value)) return *number;
    problems.push_back(str(name, "=", *value, " isn't a non-negative number"));
    return fallback;
  }

  std::optional<Claim> claim(std::string by, const char* rank_variable, const char* size_variable) {
    if (!has(rank_variable) && !has(size_variable)) return {};
    if (has(rank_variable) != has(size_variable)) {
      const bool has_rank = has(rank_variable);
      const char *given = has_rank ? rank_variable : size_variable,
                 *missing = has_rank ? size_variable : rank_variable;
      problems.push_back(str(given, "=", *text(given), " is set but ", missing, " isn't: both or neither"));
      return {};
    }
    Claim claim{std::move(by), rank_variable, size_variable, number(rank_variable, 0),
                number(size_variable, 1)};
    if (claim.size < 1 || claim.rank >= claim.size)
      problems.push_back(
          str(rank_variable, "=", claim.rank, " isn't a rank of ", size_variable, "=", claim.size));
    return claim;
  }

  std::vector<std::string> problems;

 private:
  const Environment& environment_;
};

// SLURM numbers the steps that srun starts from 0. Numbers from here on are its own: job scripts, interactive
// shells, and helpers on a node.
constexpr int64_t kFirstStepOfSlurmItself = 0xfffffff0;
constexpr int64_t kNoStep = -1;

/// The step of srun that this process belongs to.
int64_t slurm_step(Reader& env) {
  const int64_t step = env.number("SLURM_STEP_ID", env.number("SLURM_STEPID", kNoStep));
  return step < kFirstStepOfSlurmItself ? step : kNoStep;
}

std::optional<Claim> slurm_claim(Reader& env) {
  // A job script or a shell in an allocation is one process, although it has SLURM_PROCID=0 and the
  // allocation's size.
  if (!env.has("SLURM_PROCID") || slurm_step(env) == kNoStep) return {};
  for (const char* size : {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"})
    if (env.has(size)) return env.claim("slurm", "SLURM_PROCID", size);
  return env.claim("slurm", "SLURM_PROCID", "SLURM_NPROCS");
}

void check_agreement(Reader& env, const Claim& a, const Claim& b) {
  const auto refuse = [&](const char* variable, int value, const char* other, int other_value) {
    env.problems.push_back(str(variable, "=", value, " (", a.by, ") but ", other, "=", other_value, " (",
                               b.by, "): unset the one that doesn't belong to this job"));
  };
  if (a.size != b.size)
    refuse(a.size_variable, a.size, b.size_variable, b.size);
  else if (a.rank != b.rank && a.by != "openmpi")  // mpirun's ranks have the SLURM task of its own shell
    refuse(a.rank_variable, a.rank, b.rank_variable, b.rank);
}

/// A port outside the range that kernels give to clients. Two jobs on one host get different ports.
int slurm_port(Reader& env) {
  constexpr int first = 12000, count = 20000;
  const int64_t job = env.number("SLURM_JOB_ID", env.number("SLURM_JOBID", int64_t{0}));
  return first + static_cast<int>((job + 31 * (slurm_step(env) % 1000)) % count);
}

void read_slurm(Reader& env, Launch& launch) {
  const auto nodes = env.first_of({"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"});
  if (launch.store_host.empty() && nodes) launch.store_host = parse_node_list(*nodes).front();
  if (launch.store_port == 0) launch.store_port = slurm_port(env);
  launch.local_rank = env.number("SLURM_LOCALID", -1);
  const auto counts = env.first_of({"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"});
  if (!counts) return;
  const auto per_node = parse_task_counts(*counts);
  const size_t node = static_cast<size_t>(env.number("SLURM_NODEID", 0));
  if (node < per_node.size() && launch.local_rank < per_node[node]) launch.local_size = per_node[node];
}

void read_open_mpi(Reader& env, Launch& launch) {
  launch.local_rank = env.number("OMPI_COMM_WORLD_LOCAL_RANK", -1);
  launch.local_size = env.number("OMPI_COMM_WORLD_LOCAL_SIZE", -1);
  const bool one_host = launch.local_size == launch.size;
  if (launch.store_host.empty() && one_host) launch.store_host = "127.0.0.1";
  if (launch.store_port == 0 && one_host) {
    // All ranks of one mpirun see the same job identifier, and it differs between jobs on a host.
    const auto job = env.first_of({"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}).value_or("");
    launch.store_port = 12000 + static_cast<int>(std::hash<std::string>()(job) % 20000);
  }
}

void read_variables(Reader& env, Launch& launch) {
  launch.local_rank = env.number("LOCAL_RANK", -1);
  launch.local_size = env.number("LOCAL_WORLD_SIZE", -1);
  launch.listen_fd = launch.rank == 0 ? env.number("TITAN_STORE_FD", -1) : -1;
  launch.serves_store = env.text("TORCHELASTIC_USE_AGENT_STORE").value_or("") != "True";
  if (launch.by == "titan") launch.max_restarts = env.number("TITAN_MAX_RESTARTS", 0);
  if (launch.by == "torchrun") launch.max_restarts = env.number("TORCHELASTIC_MAX_RESTARTS", 0);
}

void check_store(Reader& env, const Launch& launch) {
  if (launch.size == 1) return;
  for (auto [name, missing] : {std::pair("MASTER_ADDR", launch.store_host.empty()),
                               std::pair("MASTER_PORT", launch.store_port == 0)}) {
    if (missing) {
      env.problems.push_back(str(name, " isn't set, and ", launch.by, " doesn't say where rank 0 of ",
                                 launch.size, " is: set it to the same value on all ranks"));
    }
  }
}

}  // namespace

std::vector<std::string> parse_node_list(std::string_view list) {
  std::vector<std::string> names;
  for (auto part : split_list(list)) {
    if (part.empty()) throw ConfigError(str("SLURM list '", list, "' has an empty name"));
    for (auto& name : expand(part, list)) names.push_back(std::move(name));
  }
  return names;
}

std::vector<int> parse_task_counts(std::string_view list) {
  std::vector<int> counts;
  for (auto part : split_list(list)) {
    const size_t times = part.find("(x");
    const int count = to_number(part.substr(0, times), list);
    int repeat = 1;
    if (times != std::string_view::npos) {
      if (part.back() != ')') throw ConfigError(str("SLURM list '", list, "': '(' without ')'"));
      repeat = to_number(part.substr(times + 2, part.size() - times - 3), list);
    }
    counts.insert(counts.end(), static_cast<size_t>(repeat), count);
  }
  return counts;
}

Environment process_environment() {
  return [](const char* name) -> std::optional<std::string> {
    const char* value = std::getenv(name);
    if (!value || !*value) return {};
    return std::string(value);
  };
}

Launch read_launch(const Environment& environment) {
  Reader env(environment);
  const bool elastic = env.has("TORCHELASTIC_RUN_ID"), titan = env.has("TITAN_LAUNCH");
  const auto variables = env.claim(elastic ? "torchrun" : titan ? "titan" : "env", "RANK", "WORLD_SIZE");
  std::optional<Claim> open_mpi, slurm;
  // torchrun and titan launch start their ranks themselves, inside a task of SLURM or MPI.
  if (!elastic && !titan) {
    open_mpi = env.claim("openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
    slurm = slurm_claim(env);
  }
  std::vector<Claim> claims;
  for (const auto& claim : {variables, open_mpi, slurm})
    if (claim) claims.push_back(*claim);

  Launch launch;
  launch.store_host = env.text("MASTER_ADDR").value_or("");
  launch.store_port = env.number("MASTER_PORT", 0);
  if (!claims.empty()) {
    for (size_t i = 1; i < claims.size(); ++i) check_agreement(env, claims[0], claims[i]);
    launch.by = claims[0].by;
    launch.rank = claims[0].rank;
    launch.size = claims[0].size;
    if (variables)
      read_variables(env, launch);
    else if (open_mpi)
      read_open_mpi(env, launch);
    else
      read_slurm(env, launch);
    check_store(env, launch);
  }
  if (!env.problems.empty()) throw ConfigError(env.problems);
  return launch;
}

JobIdentity read_job_identity(const Launch& launch, const Environment& environment) {
  const auto identity = [](const std::string& prefix, const auto& id, const char* problem) {
    return id ? JobIdentity{prefix + *id, ""} : JobIdentity{"", problem};
  };
  if (launch.by == "titan" && launch.max_restarts == 0)
    return {.id = "", .problem = "the launcher doesn't restart ranks: pass it --max-restarts"};
  if (launch.by == "titan")
    return identity("", environment("TITAN_JOB_ID"),
                    "TITAN_JOB_ID isn't set: titan launch has another version, which doesn't set it");
  if (launch.by == "torchrun") {
    auto id = environment("TORCHELASTIC_RUN_ID");
    if (id == "none") id.reset();  // the id of every unnamed job
    return identity("torchrun ", id, "torchrun has no --rdzv-id, which identifies the job");
  }
  if (launch.by == "slurm") return identity("slurm ", environment("SLURM_JOB_ID"), "SLURM_JOB_ID isn't set");
  return {.id = "",
          .problem = launch.by == "none"
                         ? "this rank has no launcher"
                         : str("ranks were launched by ", launch.by, ", which doesn't restart them")};
}

}  // namespace titan::dist
