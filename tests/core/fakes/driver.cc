// A mock CUDA driver with two devices. It tracks contexts, modules and launches, and rejects the
// calls that a real driver rejects. It loads the images that the mock compiler writes.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace {

enum Result {
  kSuccess = 0,
  kInvalidValue = 1,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kInvalidHandle = 400,
  kNotFound = 500,
  kCaptureUnsupported = 900,
};

struct Context {
  int device;
};
struct Module {
  Context* context;
  std::string image;
};
struct Function {
  Module* module;
  int shared_limit;  // maximum shared memory of a launch
};

struct State {
  std::mutex mutex;
  Context contexts[2] = {{0}, {1}};
  std::vector<std::unique_ptr<Module>> modules;
  std::vector<std::unique_ptr<Function>> functions;
  std::string log;
  std::map<std::string, int> numbers;
};

State& All() {
  static State state;
  return state;
}

// The context stack of the calling thread.
thread_local std::vector<Context*> stack;
thread_local int capture_mode = 0;

// Returns the number that a test has set with fake_set, or `otherwise`.
int Number(const std::string& name, int otherwise) {
  const auto found = All().numbers.find(name);
  return found == All().numbers.end() ? otherwise : found->second;
}

Context* Current() { return stack.empty() ? nullptr : stack.back(); }

void Log(const std::string& line) { All().log += line + "\n"; }

}  // namespace

extern "C" {

// Executes a launch. If it is null, launches do nothing.
int (*fake_run)(const char* image, const unsigned* grid, unsigned threads, unsigned shared_bytes,
                const void* parameters, size_t bytes) = nullptr;

// For tests: returns the events logged since the previous call.
const char* fake_take_log() {
  State& all = All();
  static std::string taken;
  const std::lock_guard<std::mutex> lock(all.mutex);
  taken = std::exchange(all.log, "");
  return taken.c_str();
}
void fake_set(const char* name, int value) {
  State& all = All();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.numbers[name] = value;
}
void fake_enter(int device) { stack = {&All().contexts[device]}; }
int fake_current() { return Current() == nullptr ? -1 : Current()->device; }
int fake_depth() { return static_cast<int>(stack.size()); }
int fake_capture_mode() { return capture_mode; }

int cuInit(unsigned) {
  State& all = All();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return Number("init", kSuccess);
}
int cuGetErrorName(int error, const char** name) {
  static const std::map<int, const char*> kNames = {
      {kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
      {kInvalidImage, "CUDA_ERROR_INVALID_IMAGE"},
      {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
      {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE"},
      {kNotFound, "CUDA_ERROR_NOT_FOUND"},
      {kCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"}};
  const auto found = kNames.find(error);
  *name = found == kNames.end() ? nullptr : found->second;
  return found == kNames.end() ? kInvalidValue : kSuccess;
}
int cuGetErrorString(int error, const char** text) {
  *text = error == kNotFound ? "named symbol not found" : nullptr;
  return kSuccess;
}
int cuDeviceGet(int* device, int ordinal) {
  if (ordinal < 0 || ordinal > 1) return kInvalidValue;
  *device = ordinal;
  return kSuccess;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  State& all = All();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const int capability = Number("capability" + std::to_string(device), 90);
  if (attribute == 75) *value = capability / 10;
  if (attribute == 76) *value = capability % 10;
  if (attribute == 97) *value = Number("shared", 227 * 1024);
  return kSuccess;
}
int cuDeviceGetName(char* name, int size, int device) {
  std::snprintf(name, static_cast<size_t>(size), "GPU %d that is none", device);
  return kSuccess;
}
int cuDevicePrimaryCtxRetain(Context** context, int device) {
  *context = &All().contexts[device];
  return kSuccess;
}
int cuCtxGetCurrent(Context** context) {
  *context = Current();
  return kSuccess;
}
int cuCtxGetDevice(int* device) {
  if (Current() == nullptr) return kInvalidContext;
  *device = Current()->device;
  return kSuccess;
}
int cuCtxPushCurrent_v2(Context* context) {
  stack.push_back(context);
  return kSuccess;
}
int cuCtxPopCurrent_v2(Context** context) {
  if (stack.empty()) return kInvalidContext;
  *context = stack.back();
  stack.pop_back();
  return kSuccess;
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, capture_mode);
  return kSuccess;
}

// Allocates host memory.
int cuMemAlloc_v2(unsigned long long* address, size_t bytes) {
  if (Current() == nullptr) return kInvalidContext;
  constexpr size_t kAlignment = 256;
  void* const memory =
      std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  *address = reinterpret_cast<uintptr_t>(memory);
  return kSuccess;
}
int cuMemFree_v2(unsigned long long address) {
  std::free(reinterpret_cast<void*>(address));
  return kSuccess;
}
int cuMemcpyHtoD_v2(unsigned long long to, const void* from, size_t bytes) {
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  return kSuccess;
}
int cuMemcpyDtoH_v2(void* to, unsigned long long from, size_t bytes) {
  std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
  return kSuccess;
}

int cuModuleLoadData(Module** module, const void* image) {
  State& all = All();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (Current() == nullptr) return kInvalidContext;
  constexpr int kRelaxed = 2;
  if (Number("capturing", 0) != 0 && capture_mode != kRelaxed) return kCaptureUnsupported;
  const std::string text = static_cast<const char*>(image);
  if (text.rfind("fake ", 0) != 0) return kInvalidImage;
  all.modules.push_back(std::make_unique<Module>(Module{Current(), text}));
  *module = all.modules.back().get();
  Log("load " + text.substr(0, text.find('\n')) + " on " + std::to_string(Current()->device));
  return kSuccess;
}
int cuModuleUnload(Module*) {
  State& all = All();
  const std::lock_guard<std::mutex> lock(all.mutex);
  Log("unload");
  return kSuccess;
}
int cuModuleGetFunction(Function** function, Module* module, const char* name) {
  State& all = All();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (module->image.find(name) == std::string::npos) return kNotFound;
  all.functions.push_back(
      std::make_unique<Function>(Function{module, 48 * 1024 - Number("static_shared", 0)}));
  *function = all.functions.back().get();
  return kSuccess;
}
int cuFuncGetAttribute(int* value, int attribute, Function*) {
  State& all = All();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (attribute != 1) return kInvalidValue;
  *value = Number("static_shared", 0);
  return kSuccess;
}
int cuFuncSetAttribute(Function* function, int attribute, int value) {
  State& all = All();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (attribute != 8 || value + Number("static_shared", 0) > Number("shared", 227 * 1024)) {
    return kInvalidValue;
  }
  function->shared_limit = value;
  Log("shared " + std::to_string(value));
  return kSuccess;
}
int cuLaunchKernel(Function* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                   void* stream, void** parameters, void** extra) {
  State& all = All();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (Current() == nullptr) return kInvalidContext;
  if (function->module->context != Current()) return kInvalidHandle;
  if (static_cast<int>(shared_bytes) > function->shared_limit || parameters != nullptr ||
      reinterpret_cast<uintptr_t>(extra[0]) != 1 || reinterpret_cast<uintptr_t>(extra[2]) != 2 ||
      extra[4] != nullptr || block_y != 1 || block_z != 1 || grid_x * grid_y * grid_z == 0) {
    return kInvalidValue;
  }
  const size_t bytes = *static_cast<const size_t*>(extra[3]);
  std::string hexadecimal;
  for (size_t n = 0; n < bytes; ++n) {
    char digits[3];
    std::snprintf(digits, sizeof(digits), "%02x", static_cast<const unsigned char*>(extra[1])[n]);
    hexadecimal += digits;
  }
  char line[256];
  std::snprintf(line, sizeof(line), " on %d stream %p grid %u %u %u threads %u shared %u with ",
                Current()->device, stream, grid_x, grid_y, grid_z, block_x, shared_bytes);
  const std::string& image = function->module->image;
  Log("launch " + image.substr(0, image.find('\n')) + line + hexadecimal);
  const unsigned grid[] = {grid_x, grid_y, grid_z};
  if (fake_run != nullptr) {
    return fake_run(image.c_str(), grid, block_x, shared_bytes, extra[1], bytes);
  }
  return Number("launch", kSuccess);
}

}  // extern "C"
