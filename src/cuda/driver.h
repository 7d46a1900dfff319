// The CUDA driver API. Its functions are declared here, so that gnomon builds without CUDA headers
// and loads without a driver.
#ifndef GNOMON_SRC_CUDA_DRIVER_H_
#define GNOMON_SRC_CUDA_DRIVER_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda/shared_library.h"

namespace gnomon::cuda {

class Driver {
 public:
  // Opaque driver types.
  using Context = struct ContextTag*;
  using Module = struct ModuleTag*;
  using Function = struct FunctionTag*;
  using Stream = struct StreamTag*;

  // Throws CudaError if there is no usable driver.
  explicit Driver(const std::string& library);

  // Throws CudaError with `what` and the driver's message if `result` is an error.
  void Check(int result, const std::string& what) const;
  // A device attribute (CUdevice_attribute).
  int Attribute(int device, int attribute) const;
  // The name of a device, such as "NVIDIA H100 PCIe".
  std::string Name(int device) const;

  static constexpr int kComputeCapabilityMajor = 75;
  static constexpr int kComputeCapabilityMinor = 76;
  static constexpr int kMaxSharedMemoryPerBlockOptIn = 97;
  // Values of CUfunction_attribute.
  static constexpr int kSharedSizeBytes = 1;
  static constexpr int kMaxDynamicSharedSizeBytes = 8;
  // Values of CUstreamCaptureMode.
  static constexpr int kCaptureModeRelaxed = 2;

  int (*device_get)(int* device, int ordinal);
  int (*context_get_current)(Context* context);
  int (*context_get_device)(int* device);
  int (*context_push)(Context context);
  int (*context_pop)(Context* context);
  int (*context_get_id)(Context context, unsigned long long* id);  // may be null
  int (*primary_context_retain)(Context* context, int device);
  int (*module_load_data)(Module* module, const void* image);
  int (*module_unload)(Module module);
  int (*module_get_function)(Function* function, Module module, const char* name);
  int (*function_get_attribute)(int* value, int attribute, Function function);
  int (*function_set_attribute)(Function function, int attribute, int value);
  int (*exchange_capture_mode)(int* mode);
  int (*launch_kernel)(Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                       Stream stream, void** parameters, void** extra);

 private:
  SharedLibrary library_;
  int (*init_)(unsigned flags);
  int (*device_get_attribute_)(int* value, int attribute, int device);
  int (*device_get_name_)(char* name, int size, int device);
  int (*get_error_name_)(int error, const char** name);
  int (*get_error_string_)(int error, const char** text);
};

// Makes the primary context of a device current for the calling thread during the object's
// lifetime, unless it already is. PyTorch uses the same context.
class CurrentContext {
 public:
  CurrentContext(const Driver& driver, int device);
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

  // A number that is unique among all contexts that this process has ever created, if the driver
  // provides one.
  uint64_t id() const { return id_; }

 private:
  const Driver& driver_;
  uint64_t id_ = 0;
  bool pushed_ = false;
};

// During its lifetime, the calling thread may perform operations that are forbidden while a stream
// is captured into a graph, such as loading a module.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Driver& driver);
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const Driver& driver_;
  int mode_ = Driver::kCaptureModeRelaxed;
};

}  // namespace gnomon::cuda

#endif  // GNOMON_SRC_CUDA_DRIVER_H_
