// Kernels of the rig: those of the CPU, each run later, on the thread of the stream that was current at the call.
//
// What an operator returns is known by calling it with meta tensors, so the host goes on at once. An operator whose
// result is a number, or has a size that depends on values, blocks the host, which is counted under its name.
// Operations hold no device memory: what the program frees too early is overwritten before they read it.
#pragma once

#include <unordered_map>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

#include "memory.h"

namespace rig {

constexpr auto kRig = c10::DeviceType::PrivateUse1;

inline bool on_rig(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kRig; }

inline bool on_cpu(const at::Tensor& tensor) { return tensor.defined() && tensor.device().is_cpu(); }

template <class Function>
void for_tensors(const c10::IValue& value, Function function) {
  if (value.isTensor()) {
    function(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& one : value.toListRef()) for_tensors(one, function);
  }
}

// Values with their tensors of the rig put elsewhere: as meta tensors, or as the bytes behind them for a CPU's kernel.
// Equal tensors stay equal, and equal storages do, so that kernels see who shares memory with whom.
class Elsewhere {
 public:
  explicit Elsewhere(c10::DeviceType type) : type_(type) {}

  c10::IValue operator()(const c10::IValue& value) {
    if (value.isTensor()) return tensor(value.toTensor());
    if (value.isDevice() && value.toDevice().type() == kRig) return c10::Device(type_);
    if (!value.isList() || value.toListRef().empty()) return value;
    auto list = c10::impl::GenericList(value.toList().elementType());
    bool changed = false;
    for (const c10::IValue& one : value.toListRef()) {
      list.push_back((*this)(one));
      changed = changed || one.isTensor() || one.isList();
    }
    return changed ? c10::IValue(list) : value;
  }

 private:
  at::Tensor tensor(const at::Tensor& source) {
    if (!source.defined()) return source;
    if (source.device().is_cpu()) return host_tensor(source);
    at::Tensor& made = tensors_[source.unsafeGetTensorImpl()];
    if (!made.defined()) made = make(source);
    return made;
  }

  // A kernel gets the values that a host's tensor has at the call.
  at::Tensor host_tensor(const at::Tensor& source) {
    if (type_ == c10::DeviceType::Meta) return source.dim() ? source.to(at::kMeta) : source;
    at::Tensor copy = source.clone();
    if (source.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    return copy;
  }

  at::Tensor make(const at::Tensor& source) {
    auto* old = source.storage().unsafeGetStorageImpl();
    auto found = storages_.find(old);
    if (found == storages_.end()) {
      void* data = old->data() == nullptr || type_ == c10::DeviceType::Meta ? nullptr : Memory::behind(old->data());
      c10::DataPtr pointer(data, c10::Device(type_));
      auto nbytes = static_cast<int64_t>(old->nbytes());
      c10::Allocator* allocator = type_ == c10::DeviceType::Meta ? c10::GetAllocator(type_) : nullptr;
      auto made = c10::Storage(c10::Storage::use_byte_size_t(), nbytes, std::move(pointer), allocator, !!allocator);
      found = storages_.emplace(old, made).first;
    }
    auto key = type_ == c10::DeviceType::Meta ? c10::DispatchKey::Meta : c10::DispatchKey::CPU;
    auto made = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(found->second), c10::DispatchKeySet(key), source.dtype());
    auto* implementation = made.unsafeGetTensorImpl();
    implementation->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
    if (source.unsafeGetTensorImpl()->is_wrapped_number()) implementation->set_wrapped_number(true);
    return made;
  }

  c10::DeviceType type_;
  std::unordered_map<const c10::TensorImpl*, at::Tensor> tensors_;
  std::unordered_map<const c10::StorageImpl*, c10::Storage> storages_;
};

inline at::Tensor behind(const at::Tensor& tensor) { return Elsewhere(c10::DeviceType::CPU)(tensor).toTensor(); }

inline at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, c10::ScalarType dtype, int device) {
  c10::DeviceGuard guard(c10::Device(kRig, device));
  return at::detail::empty_strided_generic(
      size, stride, c10::GetAllocator(kRig), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

uint64_t draw_seed();

// One call of an operator.
class Call {
 public:
  Call(const c10::OperatorHandle& op, const c10::OperatorHandle& kernel, torch::jit::Stack* stack)
      : op_(op), kernel_(kernel), schema_(op.schema()), stack_(stack) {
    size_t count = schema_.arguments().size();
    args_.assign(stack->end() - static_cast<ptrdiff_t>(count), stack->end());
    device_ = current_device();
    bool found = false;
    for (const c10::IValue& arg : args_) {
      if (arg.isDevice() && arg.toDevice().has_index()) device_ = arg.toDevice().index();
      for_tensors(arg, [&](const at::Tensor& one) {
        if (!on_rig(one)) return;
        TORCH_CHECK(!found || one.device().index() == device_, name(), ": tensors on two devices of the rig");
        device_ = one.device().index();
        found = true;
      });
    }
    refuse_host_tensors(found);
  }

  void run() {
    c10::DeviceGuard guard(c10::Device(kRig, device_));
    torch::jit::Stack shapes;
    bool known = has_known_shapes() && find_shapes(shapes);
    Elsewhere to_cpu(c10::DeviceType::CPU);
    torch::jit::Stack inputs;
    for (size_t k = 0; k < args_.size(); k++) inputs.push_back(is_generator(k) ? generator(k) : to_cpu(args_[k]));
    std::vector<c10::IValue> results = known ? launch(shapes, inputs) : compute(inputs);
    torch::jit::drop(*stack_, args_.size());
    for (c10::IValue& one : results) stack_->push_back(std::move(one));
  }

 private:
  std::string name() const { return c10::toString(schema_.operator_name()); }

  void refuse_host_tensors(bool found) const {
    if (!found || name().find("aten::index") == 0 || name().find("aten::_index_put") == 0) return;
    for (const c10::IValue& arg : args_)
      for_tensors(arg, [&](const at::Tensor& one) {
        TORCH_CHECK(
            !on_cpu(one) || one.dim() == 0, "Expected all tensors to be on the same device, but found at least two ",
            "devices, rig:", device_, " and cpu! (", name(), ")");
      });
  }

  bool has_known_shapes() const {
    if (op_.hasTag(at::Tag::dynamic_output_shape) || op_.hasTag(at::Tag::data_dependent_output)) return false;
    for (const auto& one : schema_.returns()) {
      bool list = one.type()->kind() == c10::ListType::Kind &&
                  one.type()->expectRef<c10::ListType>().getElementType()->kind() == c10::TensorType::Kind;
      if (one.type()->kind() != c10::TensorType::Kind && !list) return false;
    }
    return true;
  }

  bool find_shapes(torch::jit::Stack& shapes) {
    Elsewhere to_meta(c10::DeviceType::Meta);
    for (const c10::IValue& arg : args_) shapes.push_back(to_meta(arg));
    at::AutoDispatchBelowADInplaceOrView guard;
    try {
      op_.callBoxed(shapes);
    } catch (const c10::NotImplementedError&) {
      return false;
    }
    return true;
  }

  bool is_generator(size_t k) const {
    auto type = schema_.arguments()[k].type();
    if (type->kind() == c10::OptionalType::Kind) type = type->expectRef<c10::OptionalType>().getElementType();
    return type->kind() == c10::GeneratorType::Kind;
  }

  // Each kernel that draws gets a generator of its own, so what it draws depends on no order of streams.
  c10::IValue generator(size_t k) const {
    TORCH_CHECK(args_[k].isNone(), name(), ": the rig has no generators but its own");
    return at::make_generator<at::CPUGeneratorImpl>(draw_seed());
  }

  // The argument whose memory a result has: that of an operator which writes it, or of which it is a view.
  const at::Tensor* shared(size_t result, bool& written) const {
    const auto* alias = schema_.returns()[result].alias_info();
    if (alias == nullptr) return nullptr;
    for (size_t k = 0; k < args_.size(); k++) {
      const auto* other = schema_.arguments()[k].alias_info();
      if (other != nullptr && other->beforeSets() == alias->beforeSets() && args_[k].isTensor()) {
        written = other->isWrite();
        return &args_[k].toTensor();
      }
    }
    return nullptr;
  }

  at::Tensor view(const at::Tensor& base, const at::Tensor& shape) const {
    auto made = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), shape.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes(), shape.strides(), shape.storage_offset());
    return made;
  }

  at::Tensor fresh(const at::Tensor& like) const {
    if (!like.defined()) return like;
    return empty_strided(like.sizes(), like.strides(), like.scalar_type(), device_);
  }

  static c10::IValue map(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& function) {
    if (value.isTensor()) return function(value.toTensor());
    std::vector<at::Tensor> made;
    for (const at::Tensor& one : value.toTensorVector()) made.push_back(function(one));
    return made;
  }

  // Enqueues the kernel, and returns tensors for its results.
  std::vector<c10::IValue> launch(const torch::jit::Stack& shapes, torch::jit::Stack& inputs) {
    std::vector<c10::IValue> results, targets(shapes.size());
    bool views = !shapes.empty();
    for (size_t k = 0; k < shapes.size(); k++) {
      bool written = false;
      const at::Tensor* source = shared(k, written);
      if (source == nullptr) {
        results.push_back(map(shapes[k], [this](const at::Tensor& one) { return fresh(one); }));
        targets[k] = map(results[k], behind);
      } else if (!written) {
        results.push_back(view(*source, shapes[k].toTensor()));
      } else {
        if (source->sizes() != shapes[k].toTensor().sizes()) {  // an empty one, given as out=
          source->resize_(shapes[k].toTensor().sizes());
          for (size_t arg = 0; arg < args_.size(); arg++)
            if (args_[arg].isTensor() && args_[arg].toTensor().is_same(*source)) inputs[arg] = behind(*source);
        }
        results.push_back(*source);
      }
      views = views && source != nullptr && !written;
    }
    if (views) return results;
    streams().enqueue(current_stream(device_), [kernel = kernel_, inputs, targets]() mutable {
      kernel.callBoxed(inputs);
      for (size_t k = 0; k < targets.size(); k++) put(inputs[k], targets[k]);
    });
    return results;
  }

  static void put(const c10::IValue& made, const c10::IValue& target) {
    if (target.isTensor() && target.toTensor().defined()) target.toTensor().copy_(made.toTensor());
    if (!target.isList()) return;
    for (size_t k = 0; k < target.toListRef().size(); k++) put(made.toListRef()[k], target.toListRef()[k]);
  }

  // Runs the kernel while the host waits, because only its results tell what they are.
  std::vector<c10::IValue> compute(const torch::jit::Stack& inputs) {
    auto found = std::make_shared<torch::jit::Stack>(inputs);
    Stream* stream = current_stream(device_);
    Mark end = streams().enqueue(stream, [kernel = kernel_, found] { kernel.callBoxed(*found); });
    streams().wait(end, name());
    std::vector<c10::IValue> results;
    for (size_t k = 0; k < found->size(); k++) {
      bool written = false;
      const at::Tensor* source = shared(k, written);
      if (source != nullptr) {
        TORCH_CHECK(written && source->sizes() == (*found)[k].toTensor().sizes(), name(), ": the rig cannot");
        results.push_back(*source);
      } else if ((*found)[k].isTensor() || (*found)[k].isTensorList()) {
        results.push_back(map((*found)[k], [this](const at::Tensor& one) { return fresh(one); }));
        streams().enqueue(stream, [found, k, target = map(results[k], behind)] { put((*found)[k], target); });
      } else {
        results.push_back((*found)[k]);
      }
    }
    return results;
  }

  const c10::OperatorHandle& op_;
  const c10::OperatorHandle& kernel_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack* stack_;
  torch::jit::Stack args_;
  int device_;
};

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, op, stack).run(); }

// Backends of their own convolve by this name; its kernel here is the CPU's convolution.
inline void convolve(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  Call(op, op, stack).run();
}

inline at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(c10::Device(kRig)));
  return at::detail::empty_generic(
      size, c10::GetAllocator(kRig), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
      format);
}

inline at::Tensor empty_strided_on(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  int index = device && device->has_index() ? device->index() : current_device();
  return empty_strided(size, stride, c10::dtype_or_default(dtype), index);
}

inline void resize_storage(const c10::Storage& storage, size_t nbytes) {
  c10::DeviceGuard guard(storage.device());
  c10::DataPtr made = c10::GetAllocator(kRig)->allocate(nbytes);
  size_t kept = std::min(nbytes, storage.nbytes());
  if (kept) {
    char *target = Memory::behind(made.get()), *source = Memory::behind(storage.data());
    streams().enqueue(current_stream(storage.device().index()), [=] { memcpy(target, source, kept); });
  }
  storage.set_data_ptr(std::move(made));
  storage.set_nbytes(nbytes);
}

inline const at::Tensor& resize(
    const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  size_t nbytes = (self.storage_offset() + self.numel()) * self.itemsize();
  if (nbytes > self.storage().nbytes()) resize_storage(self.storage(), nbytes);
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

inline at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  if (stride.data() == nullptr || (stride.empty() && !size.empty())) {
    self.unsafeGetTensorImpl()->set_storage_offset(offset);
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  } else {
    self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  }
  return self;
}

inline at::Tensor& set_whole(at::Tensor& self, at::Storage source) {
  auto count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {count}, {});
}

inline at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

inline at::Scalar read_scalar(const at::Tensor& self) {
  at::Tensor source = behind(self);
  streams().wait(streams().end_of(current_stream(self.device().index())), "aten::item");
  return source.item();
}

// A copy between host and device, or on the device. The host waits unless it asked not to and its memory is
// page-locked and laid out alike; a copy from or to pageable memory waits for its whole stream, as the driver's does.
inline at::Tensor copy(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  int device = (on_rig(target) ? target : source).device().index();
  Stream* stream = current_stream(device);
  if (on_rig(source) && on_rig(target)) {
    if (source.device() != target.device()) {  // both devices' streams wait, as with copies between peers
      Stream* other = current_stream(source.device().index());
      streams().enqueue(stream, {}, streams().end_of(other));
      Mark end = streams().enqueue(stream, [to = behind(target), from = behind(source)] { to.copy_(from); });
      streams().enqueue(other, {}, end);
    } else {
      streams().enqueue(stream, [to = behind(target), from = behind(source)] { to.copy_(from); });
    }
    return target;
  }
  const at::Tensor& host = on_rig(target) ? source : target;
  bool plain = source.dtype() == target.dtype() && source.is_contiguous() && target.is_contiguous();
  bool pinned = plain && host.nbytes() && locked().holds(host.data_ptr(), host.nbytes());
  if (host.numel() == 0) return target;
  if (pinned) {
    auto held = std::make_shared<Locked::Copy>(locked(), host.data_ptr(), host.nbytes());
    char* to = on_rig(target) ? Memory::behind(target.data_ptr()) : static_cast<char*>(target.data_ptr());
    char* from = on_rig(source) ? Memory::behind(source.data_ptr()) : static_cast<char*>(source.data_ptr());
    Mark end = streams().enqueue(stream, [held, to, from, nbytes = host.nbytes()] {
      held->check();
      memcpy(to, from, nbytes);
    });
    if (!non_blocking) streams().wait(end, on_rig(target) ? "a copy to the device" : "a copy to the host");
    return target;
  }
  at::Tensor to = on_rig(target) ? behind(target) : target, from = on_rig(source) ? behind(source) : source;
  Mark end = streams().enqueue(stream, [to, from] { to.copy_(from); });
  streams().wait(end, on_rig(target) ? "a pageable copy to the device" : "a pageable copy to the host");
  return target;
}

}  // namespace rig
