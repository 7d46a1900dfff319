#include "cuda/driver.h"

namespace gnomon::cuda {

Driver::Driver(const std::string& library) : library_(library) {
  if (!library_.loaded()) {
    throw CudaError("CUDA: cannot load the driver: " + library_.error() +
                    "; install the NVIDIA driver, which provides " + library);
  }
  library_.Bind("cuInit", init_);
  library_.Bind("cuGetErrorName", get_error_name_);
  library_.Bind("cuGetErrorString", get_error_string_);
  library_.Bind("cuDeviceGet", device_get);
  library_.Bind("cuDeviceGetAttribute", device_get_attribute_);
  library_.Bind("cuDeviceGetName", device_get_name_);
  library_.Bind("cuDevicePrimaryCtxRetain", primary_context_retain);
  library_.Bind("cuCtxGetCurrent", context_get_current);
  library_.Bind("cuCtxGetDevice", context_get_device);
  // cuda.h defines cuCtxPushCurrent and cuCtxPopCurrent as macros for these names.
  library_.Bind("cuCtxPushCurrent_v2", context_push);
  library_.Bind("cuCtxPopCurrent_v2", context_pop);
  library_.BindIfThere("cuCtxGetId", context_get_id);
  library_.Bind("cuModuleLoadData", module_load_data);
  library_.Bind("cuModuleUnload", module_unload);
  library_.Bind("cuModuleGetFunction", module_get_function);
  library_.Bind("cuFuncGetAttribute", function_get_attribute);
  library_.Bind("cuFuncSetAttribute", function_set_attribute);
  library_.Bind("cuThreadExchangeStreamCaptureMode", exchange_capture_mode);
  library_.Bind("cuLaunchKernel", launch_kernel);
  Check(init_(0), "initialising the driver");
}

void Driver::Check(int result, const std::string& what) const {
  if (result == 0) return;
  const char* name = nullptr;
  const char* text = nullptr;
  get_error_name_(result, &name);
  get_error_string_(result, &text);
  throw CudaError("CUDA: " + what + ": " + (name != nullptr ? name : std::to_string(result)) +
                  (text != nullptr ? std::string(", ") + text : ""));
}

int Driver::Attribute(int device, int attribute) const {
  int value = 0;
  Check(
      device_get_attribute_(&value, attribute, device),
      "querying device " + std::to_string(device) + " for attribute " + std::to_string(attribute));
  return value;
}

std::string Driver::Name(int device) const {
  char name[256] = "";
  Check(device_get_name_(name, sizeof(name), device),
        "querying device " + std::to_string(device) + " for its name");
  return name;
}

CurrentContext::CurrentContext(const Driver& driver, int device) : driver_(driver) {
  Driver::Context context = nullptr;
  driver.Check(driver.context_get_current(&context), "querying the current context");
  int current = -1;
  if (context != nullptr) {
    driver.Check(driver.context_get_device(&current), "querying the current device");
  }
  const std::string name = "device " + std::to_string(device);
  int wanted = 0;
  driver.Check(driver.device_get(&wanted, device), "querying " + name);
  if (current != wanted) {
    // The context is never released, because PyTorch shares it until the process ends.
    driver.Check(driver.primary_context_retain(&context, wanted),
                 "retaining the context of " + name);
    driver.Check(driver.context_push(context), "activating the context of " + name);
    pushed_ = true;
  }
  unsigned long long id = reinterpret_cast<uintptr_t>(context);
  if (driver.context_get_id != nullptr && driver.context_get_id(context, &id) != 0) {
    id = reinterpret_cast<uintptr_t>(context);
  }
  id_ = id;
}

CurrentContext::~CurrentContext() {
  Driver::Context context = nullptr;
  if (pushed_) driver_.context_pop(&context);
}

RelaxedCapture::RelaxedCapture(const Driver& driver) : driver_(driver) {
  driver.Check(driver.exchange_capture_mode(&mode_), "setting the stream capture mode");
}

RelaxedCapture::~RelaxedCapture() { driver_.exchange_capture_mode(&mode_); }

}  // namespace gnomon::cuda
