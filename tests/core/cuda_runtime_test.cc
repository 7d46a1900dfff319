// Tests the CUDA runtime with a mock driver and compiler (fakes/): compiling, caching, loading and
// launching, in concurrent threads and processes.
#include <dlfcn.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "cuda/runtime.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gnomon::cuda {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

constexpr const char* kDriver = GNOMON_FAKE_DRIVER;
constexpr const char* kNvrtc = GNOMON_FAKE_NVRTC;

std::vector<std::string> Lines(std::istream&& text) {
  std::vector<std::string> lines;
  for (std::string line; std::getline(text, line);) lines.push_back(line);
  return lines;
}

// Returns the message of the error that the call throws.
template <class Call>
std::string ErrorOf(const Call& call) {
  try {
    call();
  } catch (const CudaError& error) {
    return error.what();
  }
  return "nothing was thrown";
}

class CudaRuntime : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "gnomon-cuda-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
    log_ = folder_ + "/compilations";
    setenv("FAKE_NVRTC_LOG", log_.c_str(), 1);
    // The library stays loaded and keeps its state between tests.
    library_ = dlopen(kDriver, RTLD_NOW | RTLD_LOCAL);
    ASSERT_NE(library_, nullptr) << dlerror();
    for (const char* number : {"init", "launch", "capturing", "static_shared"}) Set(number, 0);
    Set("shared", 227 * 1024);
    Set("capability0", 90);
    Set("capability1", 90);
    DriverLog();
  }
  void TearDown() override {
    unsetenv("FAKE_NVRTC_LOG");
    fs::remove_all(folder_);
  }

  RuntimeOptions Options() {
    return {.driver = kDriver,
            .nvrtc = {folder_ + "/no/libnvrtc.so.13", kNvrtc},
            .cache = folder_ + "/caches/gnomon",
            .program =
                [](const KernelName& kernel) {
                  return Program{
                      .text = kernel.kind + "-" + kernel.definition + "\nvoid gnomon_kernel();\n",
                      .files = {{"dot-inl.h", "struct Dot;"}},
                      .options = {"--std=c++20"},
                      .entry = "gnomon_kernel",
                      .title = kernel.kind + " of " + kernel.definition};
                },
            .warn = [this](const std::string& text) { warnings_.push_back(text); }};
  }

  template <class Function>
  Function* Of(const char* name) {
    return reinterpret_cast<Function*>(dlsym(library_, name));
  }
  void Set(const char* name, int value) { Of<void(const char*, int)>("fake_set")(name, value); }
  std::vector<std::string> DriverLog() {
    return Lines(std::istringstream(Of<const char*()>("fake_take_log")()));
  }
  std::vector<std::string> Compilations() { return Lines(std::ifstream(log_)); }
  std::vector<std::string> Cached() {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(Options().cache)) {
      const std::string name = entry.path().filename().string();
      if (!name.starts_with("lock.")) names.push_back(name);
    }
    std::sort(names.begin(), names.end());
    return names;
  }
  std::string OnlyEntry() {
    const std::vector<std::string> names = Cached();
    EXPECT_EQ(names.size(), 1u);
    return Options().cache + "/" + names.at(0);
  }

  static void Launch(Runtime& runtime, const KernelName& kernel, int device = 0,
                     uint32_t shared_bytes = 0) {
    const uint32_t parameter = 0x01020304;
    runtime.Launch(device, reinterpret_cast<void*>(0x70), kernel, {{3, 2, 1}, 128, shared_bytes},
                   &parameter, sizeof(parameter));
  }

  const KernelName dot_ = {.kind = "forward", .definition = "dot", .constants = {{"dim", 64}}};
  const KernelName cone_ = {.kind = "forward", .definition = "cone", .constants = {{"dim", 64}}};
  std::string folder_;
  std::string log_;
  std::vector<std::string> warnings_;
  void* library_ = nullptr;
};

TEST_F(CudaRuntime, LaunchesWithStreamShapeAndParameters) {
  Runtime runtime(Options());
  Launch(runtime, dot_);
  EXPECT_THAT(DriverLog(), ElementsAre("load fake sm_90 forward-dot on 0",
                                       "launch fake sm_90 forward-dot on 0 stream 0x70 grid 3 2 1 "
                                       "threads 128 shared 0 with 04030201"));
  Launch(runtime, dot_);
  EXPECT_THAT(DriverLog(), ElementsAre(StartsWith("launch")));
  EXPECT_THAT(Compilations(), ElementsAre("forward-dot"));
  EXPECT_THAT(warnings_, IsEmpty());
}

TEST_F(CudaRuntime, AnEmptyGridIsNotLaunched) {
  Runtime runtime(Options());
  runtime.Launch(0, nullptr, dot_, {{4, 0, 1}, 128, 0}, nullptr, 0);
  EXPECT_THAT(DriverLog(), IsEmpty());
  EXPECT_THAT(
      ErrorOf([&] { runtime.Launch(0, nullptr, dot_, {{1, 70000, 1}, 128, 0}, nullptr, 0); }),
      HasSubstr("a grid of 1 x 70000 x 1 blocks"));
}

TEST_F(CudaRuntime, KernelsDifferByKindDefinitionAndConstants) {
  Runtime runtime(Options());
  KernelName other = dot_;
  other.constants[0].second = 128;
  for (const KernelName& kernel : {dot_, cone_, other, dot_, cone_, other}) {
    Launch(runtime, kernel);
  }
  const std::vector<std::string> log = DriverLog();
  EXPECT_EQ(std::count_if(log.begin(), log.end(),
                          [](const auto& line) { return line.starts_with("load"); }),
            3);
  // Identical sources are compiled only once.
  EXPECT_THAT(Compilations(), ElementsAre("forward-dot", "forward-cone"));
}

TEST_F(CudaRuntime, EachDeviceHasItsOwnModule) {
  Set("capability1", 86);
  Runtime runtime(Options());
  Of<void(int)>("fake_enter")(0);
  for (int round = 0; round < 2; ++round) {
    Launch(runtime, dot_, 0);
    Launch(runtime, dot_, 1);
    // The caller's context is restored.
    EXPECT_EQ(Of<int()>("fake_current")(), 0);
    EXPECT_EQ(Of<int()>("fake_depth")(), 1);
  }
  EXPECT_THAT(DriverLog(),
              ElementsAre(StartsWith("load fake sm_90 forward-dot on 0"), HasSubstr("on 0 stream"),
                          StartsWith("load fake sm_86 forward-dot on 1"), HasSubstr("on 1 stream"),
                          HasSubstr("on 0 stream"), HasSubstr("on 1 stream")));
  EXPECT_THAT(Compilations(), ElementsAre("forward-dot", "forward-dot"));
}

TEST_F(CudaRuntime, AThreadWithoutContextIsGivenOneForTheCall) {
  Runtime runtime(Options());
  std::thread([&] {
    Launch(runtime, dot_, 1);
    EXPECT_EQ(Of<int()>("fake_depth")(), 0);
  }).join();
  EXPECT_THAT(DriverLog(), ElementsAre(HasSubstr("on 1"), HasSubstr("on 1 stream")));
}

TEST_F(CudaRuntime, LoadsWhileAStreamIsCaptured) {
  Set("capturing", 1);
  Runtime runtime(Options());
  Launch(runtime, dot_);
  EXPECT_THAT(DriverLog(), ElementsAre(StartsWith("load"), StartsWith("launch")));
  EXPECT_EQ(Of<int()>("fake_capture_mode")(), 0);
}

TEST_F(CudaRuntime, AsksForSharedMemoryBeyond48KiBOnce) {
  Runtime runtime(Options());
  Launch(runtime, dot_, 0, 48 * 1024);
  Launch(runtime, dot_, 0, 100 * 1024);
  Launch(runtime, dot_, 0, 90 * 1024);
  Launch(runtime, dot_, 0, 101 * 1024);
  EXPECT_THAT(DriverLog(),
              ElementsAre(StartsWith("load"), HasSubstr("shared 49152 "), "shared 102400",
                          HasSubstr("shared 102400 "), HasSubstr("shared 92160 "), "shared 103424",
                          HasSubstr("shared 103424 ")));
  EXPECT_THAT(ErrorOf([&] { Launch(runtime, dot_, 0, 228 * 1024); }),
              HasSubstr("forward of dot, dim = 64 needs 233472 bytes of shared memory per block; "
                        "device 0 has 232448"));
}

TEST_F(CudaRuntime, StaticSharedMemoryCounts) {
  Set("static_shared", 8 * 1024);
  Runtime runtime(Options());
  Launch(runtime, dot_, 0, 40 * 1024);
  Launch(runtime, dot_, 0, 41 * 1024);
  EXPECT_THAT(DriverLog(), ElementsAre(StartsWith("load"), StartsWith("launch"), "shared 41984",
                                       StartsWith("launch")));
  EXPECT_THAT(ErrorOf([&] { Launch(runtime, dot_, 0, 220 * 1024); }), HasSubstr("device 0 has"));
}

TEST_F(CudaRuntime, ErrorsOfTheDriverNameTheKernel) {
  Runtime runtime(Options());
  Set("launch", 1);
  EXPECT_EQ(ErrorOf([&] { Launch(runtime, dot_); }),
            "CUDA: launching forward of dot, dim = 64: CUDA_ERROR_INVALID_VALUE");
  Set("launch", 999);
  EXPECT_EQ(ErrorOf([&] { Launch(runtime, dot_); }),
            "CUDA: launching forward of dot, dim = 64: 999");
  Set("launch", 0);
  Launch(runtime, dot_);
}

TEST_F(CudaRuntime, AModuleWithoutTheKernelIsUnloaded) {
  RuntimeOptions options = Options();
  options.program = [](const KernelName&) {
    return Program{.text = "text", .files = {}, .options = {}, .entry = "another", .title = "text"};
  };
  Runtime runtime(options);
  EXPECT_EQ(ErrorOf([&] { Launch(runtime, dot_); }),
            "CUDA: finding forward of dot, dim = 64: CUDA_ERROR_NOT_FOUND, named symbol not found");
  EXPECT_THAT(DriverLog(), ElementsAre(StartsWith("load"), "unload"));
}

TEST_F(CudaRuntime, ErrorsOfTheCompilerNameTheDefinition) {
  RuntimeOptions options = Options();
  bool broken = true;
  options.program = [&](const KernelName& kernel) {
    Program program = Options().program(kernel);
    if (broken) program.text = "#error";
    return program;
  };
  Runtime runtime(options);
  const std::string expected =
      "CUDA: forward of dot does not compile for sm_90 with NVRTC 13.2: NVRTC_ERROR_COMPILATION\n"
      "kernel.cu(1): error: #error directive";
  EXPECT_EQ(ErrorOf([&] { Launch(runtime, dot_); }), expected);
  EXPECT_EQ(ErrorOf([&] { runtime.Compile(dot_, 90); }), expected);
  EXPECT_THAT(Cached(), IsEmpty());
  broken = false;
  Launch(runtime, dot_);
  EXPECT_EQ(Cached().size(), 1u);
}

TEST_F(CudaRuntime, NoDriver) {
  RuntimeOptions options = Options();
  options.driver = folder_ + "/libcuda.so.1";
  Runtime runtime(options);
  EXPECT_THAT(ErrorOf([&] { Launch(runtime, dot_); }),
              StartsWith("CUDA: cannot load the driver: " + options.driver + ": cannot open"));
  // Compiling does not need a driver.
  EXPECT_THAT(*runtime.Compile(dot_, 80), StartsWith("fake sm_80 forward-dot"));
}

TEST_F(CudaRuntime, ADriverThatIsNone) {
  RuntimeOptions options = Options();
  options.driver = kNvrtc;
  Runtime runtime(options);
  EXPECT_EQ(ErrorOf([&] { Launch(runtime, dot_); }),
            std::string(kNvrtc) + " lacks the function cuInit; install a newer version");
}

TEST_F(CudaRuntime, ADriverWithoutDevices) {
  Set("init", 100);
  Runtime runtime(Options());
  EXPECT_EQ(ErrorOf([&] { Launch(runtime, dot_); }), "CUDA: initialising the driver: 100");
  Set("init", 0);
  Launch(runtime, dot_);
}

TEST_F(CudaRuntime, NoCompiler) {
  RuntimeOptions options = Options();
  options.nvrtc = {folder_ + "/libnvrtc.so.13"};
  Runtime runtime(options);
  const std::string error = ErrorOf([&] { runtime.Compile(dot_, 90); });
  EXPECT_THAT(error, StartsWith("CUDA: cannot load NVRTC, which compiles the kernels: " +
                                options.nvrtc[0]));
  EXPECT_THAT(error, HasSubstr("GNOMON_NVRTC"));
  options.nvrtc.clear();
  Runtime without(options);
  EXPECT_THAT(ErrorOf([&] { without.Compile(dot_, 90); }),
              HasSubstr(": none found; install a CUDA build"));
}

TEST_F(CudaRuntime, ACompilerThatIsNone) {
  RuntimeOptions options = Options();
  options.nvrtc = {kDriver};
  Runtime runtime(options);
  EXPECT_EQ(ErrorOf([&] { Launch(runtime, dot_); }),
            std::string(kDriver) + " lacks the function nvrtcVersion; install a newer version");
}

TEST_F(CudaRuntime, ChoosesAnArchitecture) {
  Runtime runtime(Options());
  const auto target = [&](int capability) {
    const std::string binary = *runtime.Compile(dot_, capability);
    return binary.substr(5, binary.find(' ', 5) - 5);
  };
  EXPECT_EQ(target(80), "sm_80");
  EXPECT_EQ(target(87), "sm_86");
  EXPECT_EQ(target(89), "sm_89");
  EXPECT_EQ(target(90), "sm_90");
  EXPECT_EQ(target(103), "sm_100");
  EXPECT_EQ(target(121), "sm_120");
  // For an unknown architecture family, NVRTC compiles to PTX for the newest known target.
  EXPECT_EQ(target(130), "compute_120");
  EXPECT_EQ(ErrorOf([&] { target(75); }),
            "CUDA: the device has compute capability 7.5; expected 8.0 or higher");
  EXPECT_THAT(ErrorOf([&] { target(110); }),
              HasSubstr("cannot compile for compute capability 11.0"));
}

TEST_F(CudaRuntime, KernelsForOneArchitecture) {
  RuntimeOptions options = Options();
  options.program = [&](const KernelName& kernel) {
    Program program = Options().program(kernel);
    program.specific = true;
    return program;
  };
  EXPECT_THAT(*Runtime(options).Compile(dot_, 90), StartsWith("fake sm_90a "));
  Set("capability1", 89);
  EXPECT_FALSE(Runtime(Options()).IsHopper(0));
  setenv("GNOMON_HOPPER", "on", 1);
  options.hopper = cuda::OptionsOfEnvironment({}).hopper;
  EXPECT_TRUE(Runtime(options).IsHopper(0));
  EXPECT_FALSE(Runtime(options).IsHopper(1));
  setenv("GNOMON_HOPPER", "off", 1);
  EXPECT_EQ(ErrorOf([] { cuda::OptionsOfEnvironment({}); }),
            "CUDA: GNOMON_HOPPER is 'off'; expected on or an empty value");
  unsetenv("GNOMON_HOPPER");
  EXPECT_FALSE(cuda::OptionsOfEnvironment({}).hopper);
}

TEST_F(CudaRuntime, TheKeyHasAllThatMatters) {
  std::set<std::string> expected;
  const auto compile = [&](const std::function<void(Program&)>& change, int capability = 90) {
    RuntimeOptions options = Options();
    options.program = [&](const KernelName& kernel) {
      Program program = Options().program(kernel);
      change(program);
      return program;
    };
    Runtime(options).Compile(dot_, capability);
    return Cached().size();
  };
  EXPECT_EQ(compile([](Program&) {}), 1u);
  EXPECT_EQ(compile([](Program&) {}), 1u);
  EXPECT_EQ(compile([](Program&) {}, 80), 2u);
  EXPECT_EQ(compile([](Program& p) { p.text += " "; }), 3u);
  EXPECT_EQ(compile([](Program& p) { p.files[0].second += " "; }), 4u);
  EXPECT_EQ(compile([](Program& p) { p.files[0].first = "cone-inl.h"; }), 5u);
  EXPECT_EQ(compile([](Program& p) { p.options.push_back("-G"); }), 6u);
  EXPECT_EQ(compile([](Program& p) { p.options[0] = "--std=c++17"; }), 7u);
  setenv("FAKE_NVRTC_MINOR", "3", 1);
  EXPECT_EQ(compile([](Program&) {}), 8u);
  unsetenv("FAKE_NVRTC_MINOR");
  EXPECT_EQ(Compilations().size(), 8u);
  EXPECT_NE(CacheKey({"ab", "c"}), CacheKey({"a", "bc"}));
  EXPECT_NE(CacheKey({"ab"}), CacheKey({"ab", ""}));
}

TEST_F(CudaRuntime, AnotherProcessFindsWhatOneCompiled) {
  const std::string binary = *Runtime(Options()).Compile(dot_, 90);
  RuntimeOptions options = Options();
  EXPECT_EQ(*Runtime(options).Compile(dot_, 90), binary);
  EXPECT_EQ(Compilations().size(), 1u);
}

TEST_F(CudaRuntime, DamagedEntriesAreCompiledAnew) {
  const std::string binary = *Runtime(Options()).Compile(dot_, 90);
  const std::string path = OnlyEntry();
  std::ostringstream whole;
  whole << std::ifstream(path, std::ios::binary).rdbuf();
  std::vector<std::string> damaged = {"",
                                      "gnomon cubin 1\n",
                                      whole.str().substr(0, 79),
                                      whole.str().substr(0, whole.str().size() - 1),
                                      whole.str() + "x",
                                      "another file altogether"};
  for (const size_t at : {size_t{0}, size_t{20}, size_t{90}, whole.str().size() - 1}) {
    damaged.push_back(whole.str());
    damaged.back()[at] ^= 1;
  }
  size_t compilations = 1;
  for (const std::string& text : damaged) {
    std::ofstream(path, std::ios::binary) << text;
    EXPECT_EQ(*Runtime(Options()).Compile(dot_, 90), binary);
    EXPECT_EQ(Compilations().size(), ++compilations);
    EXPECT_EQ(*Runtime(Options()).Compile(dot_, 90), binary);
    EXPECT_EQ(Compilations().size(), compilations) << "the entry was not repaired";
  }
  EXPECT_THAT(warnings_, IsEmpty());
}

TEST_F(CudaRuntime, AFolderThatCannotBeWritten) {
  std::ofstream(folder_ + "/file") << "no folder";
  RuntimeOptions options = Options();
  options.cache = folder_ + "/file/gnomon";
  Runtime runtime(options);
  for (int round = 0; round < 2; ++round) {
    Launch(runtime, dot_);
    Launch(runtime, cone_);
  }
  EXPECT_THAT(Compilations(), ElementsAre("forward-dot", "forward-cone"));
  EXPECT_THAT(warnings_,
              ElementsAre(HasSubstr("cannot cache compiled CUDA kernels in " + options.cache)));
}

// The cache folder may be deleted at any time.
TEST_F(CudaRuntime, AFolderThatIsDeleted) {
  const std::string folder = Options().cache;
  RuntimeOptions options = Options();
  Runtime(options).Compile(dot_, 90);
  fs::remove_all(folder);
  EXPECT_THAT(*Runtime(options).Compile(dot_, 90), StartsWith("fake sm_90 forward-dot"));
  EXPECT_EQ(Cached().size(), 1u);
  // The folder may be deleted even during a compilation.
  CubinCache cache(folder, options.warn);
  EXPECT_EQ(*cache.Get("0",
                       [&] {
                         fs::remove_all(folder);
                         return std::string("binary");
                       }),
            "binary");
  EXPECT_THAT(Cached(), ElementsAre("0.cubin"));
  EXPECT_THAT(warnings_, IsEmpty());
}

TEST_F(CudaRuntime, ALockThatCannotBeTaken) {
  for (const char digit : std::string("0123456789abcdef")) {
    fs::create_directories(Options().cache + "/lock." + digit);
  }
  EXPECT_THAT(*Runtime(Options()).Compile(dot_, 90), StartsWith("fake sm_90 forward-dot"));
  Runtime(Options()).Compile(dot_, 90);
  EXPECT_THAT(Compilations(), ElementsAre("forward-dot"));
  EXPECT_THAT(warnings_, IsEmpty());
}

TEST_F(CudaRuntime, NoFolder) {
  RuntimeOptions options = Options();
  options.cache = "";
  Runtime runtime(options);
  Launch(runtime, dot_);
  Launch(runtime, dot_);
  EXPECT_EQ(Compilations().size(), 1u);
  EXPECT_THAT(warnings_, IsEmpty());
}

TEST_F(CudaRuntime, ThreadsCompileAndLoadOnce) {
  Runtime runtime(Options());
  constexpr int kThreads = 8, kRounds = 50;
  std::vector<std::thread> threads;
  std::atomic<bool> go{false};
  for (int n = 0; n < kThreads; ++n) {
    threads.emplace_back([&, n] {
      while (!go) std::this_thread::yield();
      for (int round = 0; round < kRounds; ++round) {
        Launch(runtime, (n + round) % 2 == 0 ? dot_ : cone_, round % 3 == 0 ? 1 : 0,
               static_cast<uint32_t>(1024 * (round + n)));
      }
    });
  }
  go = true;
  for (std::thread& thread : threads) thread.join();
  const std::vector<std::string> log = DriverLog();
  const auto count = [&](const char* prefix) {
    return std::count_if(log.begin(), log.end(),
                         [&](const auto& line) { return line.starts_with(prefix); });
  };
  EXPECT_EQ(count("load"), 4);
  EXPECT_EQ(count("launch"), kThreads * kRounds);
  EXPECT_EQ(Compilations().size(), 2u);
}

// Runs body in concurrent child processes, and returns their exit statuses.
template <class Body>
std::vector<int> InProcesses(int count, const Body& body) {
  std::vector<pid_t> children;
  for (int n = 0; n < count; ++n) {
    const pid_t child = fork();
    if (child == 0) _exit(body(n));
    children.push_back(child);
  }
  std::vector<int> ends;
  for (const pid_t child : children) {
    int status = -1;
    waitpid(child, &status, 0);
    ends.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : -1);
  }
  return ends;
}

TEST_F(CudaRuntime, ProcessesCompileOnce) {
  const std::vector<int> ends = InProcesses(6, [&](int n) {
    Runtime runtime(Options());
    const KernelName& first = n % 2 == 0 ? dot_ : cone_;
    const KernelName& second = n % 2 == 0 ? cone_ : dot_;
    const bool good = runtime.Compile(first, 90)->find("fake sm_90") == 0 &&
                      runtime.Compile(second, 90)->find("fake sm_90") == 0;
    return good && warnings_.empty() ? 0 : 1;
  });
  EXPECT_THAT(ends, ::testing::Each(0));
  EXPECT_THAT(Compilations(), ::testing::UnorderedElementsAre("forward-dot", "forward-cone"));
  EXPECT_EQ(Cached().size(), 2u);
}

// Partially written files are discarded.
TEST_F(CudaRuntime, ADiskThatIsFull) {
  const std::vector<int> ends = InProcesses(1, [&](int) {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit = {100, 100};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return 1;
    Runtime runtime(Options());
    if (runtime.Compile(dot_, 90)->find("fake sm_90 forward-dot") != 0) return 2;
    if (warnings_.size() != 1 || warnings_[0].find("File too large") == std::string::npos) return 3;
    return 0;
  });
  EXPECT_THAT(ends, ElementsAre(0));
  EXPECT_THAT(Cached(), IsEmpty());
}

// A killed process that had the same process ID has left files behind.
TEST_F(CudaRuntime, FilesOfAnotherProcessAreNotInTheWay) {
  const std::string binary = *Runtime(Options()).Compile(dot_, 90);
  const std::string entry = OnlyEntry();
  fs::remove(entry);
  const std::string stem = fs::path(entry).replace_extension("").string();
  for (int n = 0; n < 1000; ++n) {
    std::ofstream(stem + "." + std::to_string(getpid()) + "." + std::to_string(n) + ".new") << "";
  }
  EXPECT_EQ(*Runtime(Options()).Compile(dot_, 90), binary);
  EXPECT_TRUE(fs::exists(entry));
  EXPECT_THAT(warnings_, IsEmpty());
}

TEST_F(CudaRuntime, AProcessThatDiesWhileItCompilesHoldsNobodyUp) {
  const std::vector<int> ends = InProcesses(1, [&](int) {
    CubinCache cache(Options().cache);
    cache.Get("0", []() -> std::string { _exit(7); });
    return 0;
  });
  EXPECT_THAT(ends, ElementsAre(7));
  CubinCache cache(Options().cache);
  EXPECT_EQ(*cache.Get("0", [] { return std::string("binary"); }), "binary");
}

TEST(CudaCache, Folder) {
  const auto with = [](const char* own, const char* caches, const char* home) {
    for (const auto& [name, value] :
         {std::pair("GNOMON_CACHE", own), std::pair("XDG_CACHE_HOME", caches),
          std::pair("HOME", home)}) {
      value != nullptr ? setenv(name, value, 1) : unsetenv(name);
    }
    return DefaultCacheFolder();
  };
  const std::string home = std::getenv("HOME") != nullptr ? std::getenv("HOME") : "/";
  EXPECT_EQ(with("/own", "/caches", "/home/me"), "/own");
  EXPECT_EQ(with("", "/caches", "/home/me"), "/caches/gnomon");
  EXPECT_EQ(with(nullptr, "relative", "/home/me"), "/home/me/.cache/gnomon");
  EXPECT_EQ(with(nullptr, nullptr, nullptr), "");
  with(nullptr, nullptr, home.c_str());
}

TEST(CudaNvrtc, IsFoundInWheelsAndFolders) {
  std::string name = (fs::temp_directory_path() / "gnomon-nvrtc-XXXXXX").string();
  ASSERT_NE(mkdtemp(name.data()), nullptr);
  const fs::path packages = name;
  for (const char* folder : {"torch/lib", "nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"}) {
    fs::create_directories(packages / folder);
  }
  for (const char* file : {"nvidia/cu13/lib/libnvrtc.so.13", "nvidia/cu13/lib/libnvrtc.so.9",
                           "nvidia/cu13/lib/libnvrtc-builtins.so.13.2",
                           "nvidia/cu13/lib/libnvrtc.so.13.alt", "torch/lib/libnvrtc.so.12"}) {
    std::ofstream(packages / file) << "";
  }
  const std::string torch_lib = (packages / "torch/lib").string();
  EXPECT_THAT(NvrtcFoldersOfTorch(torch_lib),
              ElementsAre((packages / "nvidia/cuda_nvrtc/lib").string(),
                          (packages / "nvidia/cu13/lib").string(), torch_lib));
  EXPECT_THAT(NvrtcLibrariesIn((packages / "nvidia/cu13/lib").string()),
              ElementsAre(HasSubstr("libnvrtc.so.13"), HasSubstr("libnvrtc.so.9")));
  EXPECT_THAT(NvrtcLibrariesIn(torch_lib), ElementsAre(HasSubstr("libnvrtc.so.12")));
  EXPECT_THAT(NvrtcLibrariesIn("/no/such/folder"), IsEmpty());
  fs::remove_all(packages);
}

}  // namespace
}  // namespace gnomon::cuda
