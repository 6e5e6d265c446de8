// A counterfeit of CUDA's runtime library, libcudart: enough of it that the CUDA build of torch runs on a machine
// without a GPU, with its own allocators, streams, events and graphs. Copies and fills run, on the threads of streams,
// in one of the orders of tests/rig/streams.h; no other kernel does. See docs/devices.md.
//
// The driver's rules are applied strictly: what it leaves open is an error here.
#include <cuda_runtime_api.h>

#include <utility>

#include "device.h"

namespace rig {

Streams& streams() {
  static auto* all = [] {
    auto* made = new Streams();
    made->set_policy(fake::order().policy, fake::order().seed);
    return made;
  }();
  return *all;
}

void Streams::prepare_thread() {}

std::string Streams::words_of(const std::exception& error) { return error.what(); }

}  // namespace rig

using namespace fake;

extern "C" {

// The names of functions that torch's libraries need and nobody counterfeits are generated beside this file.
int fake_cudart_missing(const char* name) {
  complain(std::string("called and not counterfeited: ") + name);
  return answer(cudaErrorNotSupported);
}

// What tests ask of the counterfeit.

void fake_cudart_set_order(const char* text) {
  order() = Order(text);
  rig::streams().set_policy(order().policy, order().seed);
}
void fake_cudart_restart() {  // as a new process would begin
  rig::streams().restart();
  last_error = cudaSuccess;
}
int64_t fake_cudart_waits() {  // how often the host has waited for a device
  int64_t sum = 0;
  for (auto& [why, count] : rig::streams().blocked()) sum += count;
  return sum;
}

// Devices.

cudaError_t cudaGetDeviceCount(int* count) {  // FAKE_CUDART_DEVICES says less
  const char* fewer = getenv("FAKE_CUDART_DEVICES");
  *count = fewer ? std::min(atoi(fewer), rig::kDevices) : rig::kDevices;
  return *count ? cudaSuccess : answer(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int* device) {
  *device = this_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= rig::kDevices) return answer(cudaErrorInvalidDevice);
  this_device = device;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int device) {
  if (device < 0 || device >= rig::kDevices) return answer(cudaErrorInvalidDevice);
  *found = {};
  strcpy(found->name, "counterfeit");
  found->totalGlobalMem = kMemory;
  found->major = 8;
  found->warpSize = 32;
  found->multiProcessorCount = 1;
  found->maxThreadsPerBlock = found->maxThreadsPerMultiProcessor = 1024;
  found->sharedMemPerBlock = found->sharedMemPerMultiprocessor = 48 << 10;
  found->unifiedAddressing = found->canMapHostMemory = found->hostRegisterSupported = 1;
  for (int k = 0; k < 3; k++) found->maxThreadsDim[k] = found->maxGridSize[k] = 1024;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -1;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  return attempt_unsafe([] {
    rig::streams().wait_for_device(this_device, "a device");
    return cudaSuccess;
  });
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }
cudaError_t cudaGetDriverEntryPointByVersion(
    const char*, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
  *function = nullptr;
  if (result) *result = cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {  // of libcuda, under whose name this is found too
  *flags = 0;
  *active = 1;
  return 0;
}

// Errors.

cudaError_t cudaPeekAtLastError() { return last_error; }
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
const char* cudaGetErrorName(cudaError_t) { return "cudaError"; }
const char* cudaGetErrorString(cudaError_t error) {
  static const std::map<cudaError_t, const char*> words = {
      {cudaSuccess, "no error"},
      {cudaErrorMemoryAllocation, "out of memory"},
      {cudaErrorNotReady, "device not ready"},
      {cudaErrorHostMemoryAlreadyRegistered, "part or all of the requested memory range is already mapped"},
      {cudaErrorHostMemoryNotRegistered, "pointer does not correspond to a registered memory region"},
      {cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"},
      {cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture"},
      {cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"},
      {cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream"},
      {cudaErrorCapturedEvent, "operation not permitted on an event last recorded in a capturing stream"}};
  if (error == cudaErrorIllegalAddress || error == cudaErrorNotSupported) return last_words.c_str();
  auto found = words.find(error);
  return found == words.end() ? "an error of the counterfeit libcudart" : found->second;
}

// Memory.

cudaError_t cudaMalloc(void** pointer, size_t nbytes) {
  return attempt_unsafe([&] {
    *pointer = memory(this_device).allocate(nbytes);
    return *pointer ? cudaSuccess : cudaErrorMemoryAllocation;
  });
}
cudaError_t cudaFree(void* pointer) {  // waits for the device
  return attempt_unsafe([&] {
    if (pointer == nullptr) return cudaSuccess;
    Memory* found = holder(pointer);
    for (int device = 0; device < rig::kDevices; device++)
      if (found == &memory(device)) rig::streams().wait_for_device(device, "freeing memory");
    return found && found->release(pointer) ? cudaSuccess : cudaErrorInvalidValue;
  });
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = memory(this_device).free_bytes();
  *total = kMemory;
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** pointer, size_t nbytes, unsigned) {
  return attempt_unsafe([&] {
    if (posix_memalign(pointer, 4096, nbytes)) return cudaErrorMemoryAllocation;
    locked().add(*pointer, nbytes, true);
    return cudaSuccess;
  });
}
cudaError_t cudaFreeHost(void* pointer) {
  return attempt([&] { return locked().remove(pointer) ? cudaSuccess : cudaErrorInvalidValue; });
}
cudaError_t cudaHostRegister(void* pointer, size_t nbytes, unsigned) {
  return attempt([&] {
    if (!locked().add(pointer, nbytes, false)) return cudaErrorHostMemoryAlreadyRegistered;
    return cudaSuccess;
  });
}
cudaError_t cudaHostUnregister(void* pointer) {
  return attempt([&] {
    size_t nbytes = locked().bytes_of(pointer);
    if (nbytes && !mapped(pointer, nbytes)) complain("host memory was freed before it was unregistered");
    return locked().remove(pointer) ? cudaSuccess : cudaErrorHostMemoryNotRegistered;
  });
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* pointer) {
  *found = {};
  for (int device = 0; device < rig::kDevices; device++) {
    if (!memory(device).holds(pointer)) continue;
    found->type = cudaMemoryTypeDevice;
    found->device = device;
    found->devicePointer = const_cast<void*>(pointer);
    return cudaSuccess;
  }
  found->hostPointer = const_cast<void*>(pointer);
  if (!locked().holds(pointer, 1)) return cudaSuccess;  // type stays cudaMemoryTypeUnregistered
  found->type = cudaMemoryTypeHost;
  found->devicePointer = found->hostPointer;
  return cudaSuccess;
}

// What runs on a stream.

cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t nbytes, cudaMemcpyKind, cudaStream_t stream) {
  return attempt([&] { return copy(target, source, nbytes, stream_of(stream)); });
}
cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t nbytes, cudaStream_t stream) {
  return attempt([&] { return copy(target, source, nbytes, stream_of(stream)); });
}
cudaError_t cudaMemcpy(void* target, const void* source, size_t nbytes, cudaMemcpyKind) {
  return attempt_unsafe([&] {
    Stream* stream = stream_of(nullptr);
    cudaError_t error = copy(target, source, nbytes, stream);
    rig::streams().wait(rig::streams().end_of(stream), "a copy");
    return error;
  });
}
cudaError_t cudaMemsetAsync(void* target, int value, size_t nbytes, cudaStream_t stream) {
  return attempt([&] { return fill(target, std::string(1, static_cast<char>(value)), nbytes, stream_of(stream)); });
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return attempt([&] { return enqueue(stream_of(stream), [=] { function(data); }); });
}
cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  return attempt([&] { return launch(function, arguments, stream); });
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  return attempt([&] { return launch(kernel, arguments, stream); });
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  launches.push_back({grid, block, shared, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  if (launches.empty()) return answer(cudaErrorMissingConfiguration);
  *grid = launches.back().grid;
  *block = launches.back().block;
  *shared = launches.back().shared;
  *static_cast<cudaStream_t*>(stream) = launches.back().stream;
  launches.pop_back();
  return cudaSuccess;
}
void** __cudaRegisterFatBinary(void* binary) { return static_cast<void**>(binary); }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(
    void**, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  kernels()[function] = name;
}

// Streams and events.

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  return attempt([&] { return make_stream(stream, flags, priority); });
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return attempt([&] { return make_stream(stream, flags, 0); });
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream_of(stream)->id > rig::kPooled ? -1 : 0;
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return attempt_unsafe([&] {
    auto& all = rig::streams();
    return all.query(all.end_of(stream_of(stream))) ? cudaSuccess : cudaErrorNotReady;
  });
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  return attempt_unsafe([&] {
    Stream* stream = stream_of(handle);
    if (auto capture = captures().of(stream)) return captures().refuse(capture);
    rig::streams().wait(rig::streams().end_of(stream), "a stream");
    return cudaSuccess;
  });
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  return attempt([&] {
    Stream* stream = stream_of(handle);
    if (event->capture || captures().of(stream)) return captures().wait(stream, event);
    if (event->mark.stream) rig::streams().enqueue(stream, {}, event->mark);  // else it was never recorded
    return cudaSuccess;
  });
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new CUevent_st{this_device};
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return attempt([&] { return record(event, stream); });
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return flags ? answer(cudaErrorNotSupported) : cudaEventRecord(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return attempt_unsafe([&] {
    if (event->capture) return cudaErrorCapturedEvent;
    return event->mark.stream == nullptr || rig::streams().query(event->mark) ? cudaSuccess : cudaErrorNotReady;
  });
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return attempt_unsafe([&] {
    if (event->capture) return cudaErrorCapturedEvent;
    if (event->mark.stream) rig::streams().wait(event->mark, "an event");
    return cudaSuccess;
  });
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t stop) {
  return attempt([&] {
    if (start->capture || stop->capture) return cudaErrorCapturedEvent;
    for (cudaEvent_t event : {start, stop}) {
      if (event->mark.stream == nullptr) return cudaErrorInvalidResourceHandle;
      if (!rig::streams().reached(event->mark)) return cudaErrorNotReady;
    }
    *milliseconds = static_cast<float>(*stop->ran_at - *start->ran_at) / 1e6f;
    return cudaSuccess;
  });
}

// Graphs.

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(stream, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}
cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph,
    const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges, size_t* count) {
  if (edges) return answer(cudaErrorNotSupported);
  auto capture = captures().of(stream_of(stream));
  *status = !capture           ? cudaStreamCaptureStatusNone
            : capture->broken ? cudaStreamCaptureStatusInvalidated
                              : cudaStreamCaptureStatusActive;
  if (!capture) return cudaSuccess;
  if (id) *id = capture->id;
  if (graph) *graph = capture->graph.get();
  if (nodes || count) {
    static thread_local std::vector<cudaGraphNode_t> handles;
    handles = captures().handles(capture, stream_of(stream));
    if (nodes) *nodes = handles.data();
    if (count) *count = handles.size();
  }
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  return attempt([&] { return captures().begin(stream_of(stream), mode); });
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  return attempt([&] { return captures().end(stream_of(stream), graph); });
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  if (nodes) return answer(cudaErrorNotSupported);
  *count = graph->nodes.size();
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  *made = new CUgraphExec_st{std::make_shared<const std::vector<Node>>(graph->nodes)};
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  return attempt([&] {
    if (captures().of(stream_of(stream))) return cudaErrorNotSupported;
    static std::atomic<uint64_t> count{0};
    uint64_t draw = order().seed * 1'000'003 + count++;
    return enqueue(
        stream_of(stream), [nodes = graph->nodes, policy = order().policy, draw] { run_nodes(*nodes, policy, draw); });
  });
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

}  // extern "C"
