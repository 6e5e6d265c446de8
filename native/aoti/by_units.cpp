#include "by_units.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <set>

#include "../failure.h"
#include "operators.h"

namespace penstock {

namespace {

using Arguments = std::vector<c10::IValue>;
using Numbers = Units::Numbers;

// How an operator is told which slices of its argument number `weight` it needs: argument number `index` has their
// numbers, of which negative ones count from the end if it `wraps`, as the only entry of a list if it is `listed`, or the
// end of each slice's run among the rows of argument 0 (`ends`). Without an index it needs all.
struct Contract {
    const char *name, *arguments;      // of the overload of by_units
    const char *operator_name;         // as payloads have it
    const char *called, *overload;     // as torch has it
    size_t weight;
    int index;
    bool ends, wraps, listed;
};

constexpr const char *FALLBACK = "transformers::grouped_mm_fallback";

const Contract CONTRACTS[] = {
    {"embedding", "Tensor weight, Tensor indices, SymInt padding_idx, bool scale_grad_by_freq, bool sparse",
     "aten.embedding.default", "aten::embedding", "", 0, 1, false, false, false},
    {"index_select", "Tensor weight, int dim, Tensor index", "aten.index_select.default", "aten::index_select", "", 0, 2,
     false, false, false},
    {"index", "Tensor weight, Tensor?[] indices", "aten.index.Tensor", "aten::index", "Tensor", 0, 1, false, true, true},
    {"grouped_mm", "Tensor rows, Tensor weight, Tensor? offs, Tensor? bias, ScalarType? out_dtype",
     "aten._grouped_mm.default", "aten::_grouped_mm", "", 1, 2, true, false, false},
    {"grouped_mm_fallback", "Tensor rows, Tensor weight, Tensor offs", "transformers.grouped_mm_fallback.default",
     FALLBACK, "", 1, 2, true, false, false},
    {"linear", "Tensor rows, Tensor weight, Tensor? bias", "aten.linear.default", "aten::linear", "", 1, -1, false, false,
     false},
};

const Contract &contract_of(const std::string &overload) {
    const auto is_named = [&](const Contract &one) { return overload == one.name; };
    return *std::find_if(std::begin(CONTRACTS), std::end(CONTRACTS), is_named);
}

[[noreturn]] void refuse(const std::string &what) {
    throw Failure(PS_PAYLOAD, what + ": the plan and the program are not of one compilation; compile again");
}

at::Tensor index_of(const Contract &contract, const Arguments &arguments) {
    const c10::IValue &index = arguments[contract.index];
    return contract.listed ? index.toListRef().at(0).toTensor() : index.toTensor();
}

Arguments replaced(const Contract &contract, Arguments arguments, const at::Tensor &weight, const at::Tensor &index) {
    arguments[contract.weight] = weight;
    if (contract.listed)
        arguments[contract.index] = c10::List<std::optional<at::Tensor>>({index});
    else
        arguments[contract.index] = index;
    return arguments;
}

// transformers defines it in Python, and so do its products here: one for each expert that has rows.
at::Tensor grouped_mm_fallback(const at::Tensor &rows, const at::Tensor &weight, const at::Tensor &ends) {
    at::Tensor result = at::zeros({rows.size(0), weight.size(2)}, rows.options());
    const at::Tensor at = ends.to(at::kLong).contiguous();
    int64_t start = 0;
    for (int64_t expert = 0; expert < at.numel(); ++expert) {
        const int64_t end = at.const_data_ptr<int64_t>()[expert];
        if (start == end) continue;
        at::Tensor part = result.slice(0, start, end);
        at::mm_out(part, rows.slice(0, start, end), weight.select(0, expert));
        start = end;
    }
    return result;
}

at::Tensor call(const Contract &contract, Arguments arguments) {
    if (contract.called == FALLBACK)
        return grouped_mm_fallback(arguments[0].toTensor(), arguments[1].toTensor(), arguments[2].toTensor());
    c10::Dispatcher::singleton().findSchemaOrThrow(contract.called, contract.overload).callBoxed(arguments);
    return arguments.at(0).toTensor();
}

Numbers numbers_in(const at::Tensor &tensor) {
    const at::Tensor flat = tensor.reshape({-1}).to(at::kLong).contiguous();
    const int64_t *const first = flat.const_data_ptr<int64_t>();
    return {first, first + flat.numel()};
}

// The numbers of the units that a call names, ascending. What it names beyond all of them is left out: the operator
// itself refuses that, before it reads.
Numbers units_of(const Contract &contract, const Numbers &index, const PooledRead &read) {
    std::set<int64_t> named;
    const int64_t slices = read.count * read.slices;
    for (size_t k = 0; k < index.size(); ++k) {
        int64_t slice = index[k];
        if (contract.ends) {
            if (slice <= (k ? index[k - 1] : 0)) continue;
            slice = static_cast<int64_t>(k);
        } else if (contract.wraps && slice < 0) {
            slice += slices;
        }
        if (slice >= 0 && slice < slices) named.insert(slice / read.slices);
    }
    return {named.begin(), named.end()};
}

// Units of one part, in memory as long as this.
class Held {
  public:
    Held(Units &units, const PooledRead &read, const Numbers &part, bool alone) : units_(units), read_(read), part_(part) {
        units.hold(read, part, alone);
    }
    ~Held() { units_.release(read_, part_); }
    Held(const Held &) = delete;

  private:
    Units &units_;
    const PooledRead &read_;
    const Numbers &part_;
};

// A call whose units do not fit into memory together, in rounds (passes/sparse/calls.py).
struct Rounds {
    const Contract &contract;
    const Arguments &arguments;
    Units &units;
    const PooledRead &read;
    const std::vector<Numbers> &parts;

    // Rows of a product by experts depend on one expert only.
    at::Tensor by_ends() const {
        const at::Tensor weight = read.tensor, ends = index_of(contract, arguments), rows = arguments[0].toTensor();
        const Numbers at = numbers_in(ends);
        if (!std::is_sorted(at.begin(), at.end()) || (!at.empty() && (at.front() < 0 || at.back() > rows.size(0))))
            throw Failure(PS_STREAM, "the ends of the experts' rows do not ascend from 0 to " + std::to_string(rows.size(0)) +
                                         ": such a call cannot run in rounds; give a budget that holds all experts that a "
                                         "call asks for");
        at::Tensor result;
        for (size_t k = 0; k < parts.size(); ++k) {
            const bool last = k + 1 == parts.size();
            const int64_t first = k ? parts[k].front() : 0, stop = last ? weight.size(0) : parts[k].back() + 1;
            const int64_t start = first ? at[first - 1] : 0, end = last ? rows.size(0) : at[stop - 1];
            Arguments own = replaced(contract, arguments, weight.slice(0, first, stop), ends.slice(0, first, stop) - start);
            own[0] = rows.slice(0, start, end);
            at::Tensor made;
            {
                const Held held(units, read, parts[k], false);
                made = call(contract, std::move(own));
            }
            if (!result.defined())  // rows may be longer in memory than they are wide
                result = at::empty_strided({rows.size(0), made.size(1)}, made.strides(), made.options());
            result.slice(0, start, end).copy_(made);
        }
        return result;
    }

    // Rows of a table are copied.
    at::Tensor by_numbers() const {
        const at::Tensor weight = read.tensor, index = index_of(contract, arguments), flat = index.reshape({-1});
        const at::Tensor numbers = contract.wraps ? at::where(flat < 0, flat + weight.size(0), flat) : flat;
        const at::Tensor beyond = flat.index({(numbers < 0).logical_or(numbers >= weight.size(0))});
        if (beyond.numel()) call(contract, replaced(contract, arguments, weight, beyond));  // which refuses them
        std::vector<int64_t> sizes = weight.sizes().vec(), shape = index.sizes().vec();
        shape.insert(shape.end(), sizes.begin() + 1, sizes.end());
        sizes[0] = flat.numel();
        at::Tensor result = at::empty(sizes, weight.options());
        for (const Numbers &part : parts) {
            const int64_t first = part.front() * read.slices, stop = (part.back() + 1) * read.slices;
            const at::Tensor places = at::nonzero((numbers >= first).logical_and(numbers < stop)).reshape({-1});
            const Held held(units, read, part, false);
            result.index_put_({places}, call(contract, replaced(contract, arguments, weight, flat.index({places}))));
        }
        return result.reshape(shape);
    }
};

at::Tensor read_by_units(const Contract &contract, Arguments arguments, Units &units, const PooledRead &read) {
    const at::Tensor weight = arguments[contract.weight].toTensor(), &own = read.tensor;
    if (read.operator_name != contract.operator_name || contract.index < 0 || weight.scalar_type() != own.scalar_type() ||
        weight.sizes() != own.sizes() || weight.strides() != own.strides())
        refuse("step " + std::to_string(read.step) + " reads another tensor, or by another operator, than its plan says");
    const at::Tensor index = index_of(contract, arguments);
    arguments = replaced(contract, std::move(arguments), own, index);
    const std::vector<Numbers> parts = units.ask(read, units_of(contract, numbers_in(index), read));
    if (parts.size() > 1) {
        const Rounds rounds{contract, arguments, units, read, parts};
        return contract.ends ? rounds.by_ends() : rounds.by_numbers();
    }
    const Numbers none;
    const Held held(units, read, parts.empty() ? none : parts.front(), true);
    return call(contract, std::move(arguments));
}

// One pass runs one method, so the number of the graph, the last argument but one, tells nothing.
void by_units(const c10::OperatorHandle &handle, torch::jit::Stack *stack) {
    Probes *const probes = Probes::current();
    if (!probes) throw std::runtime_error("compiled code that reads by units ran outside of a pass: nothing brings them");
    try {
        const Contract &contract = contract_of(handle.operator_name().overload_name);
        const size_t count = handle.schema().arguments().size();
        Arguments arguments(stack->end() - static_cast<int64_t>(count), stack->end() - 2);
        const int64_t number = stack->back().toInt();
        stack->resize(stack->size() - count);
        Units *const units = probes->units();
        const PooledRead *const read = units ? units->find(number) : nullptr;
        stack->emplace_back(read ? read_by_units(contract, std::move(arguments), *units, *read)
                                 : call(contract, std::move(arguments)));
    } catch (...) {
        probes->failure = std::current_exception();
        throw std::runtime_error("a read by units failed");
    }
}

}  // namespace

void register_by_units() {
    // Never destroyed, as in `register_operators`.
    static auto *const library = [] {
        auto *const made = new torch::Library(torch::Library::FRAGMENT, "penstock", std::nullopt, __FILE__, __LINE__);
        for (const Contract &one : CONTRACTS) {
            const std::string name = std::string("by_units.") + one.name;
            made->def((name + "(" + one.arguments + ", int graph, int read) -> Tensor").c_str());
            made->impl(name.c_str(), torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd,
                                                     torch::CppFunction::makeFromBoxedFunction<&by_units>()));
        }
        return made;
    }();
    (void)library;
}

}  // namespace penstock
