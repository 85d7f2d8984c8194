//! The contents of the compiled module `shardwise._core`: it converts arguments, calls the core,
//! and converts the answers back.

mod arrays;
mod assignment;
mod checksum;
mod collective;
mod convert;
mod dtensor;
mod errors;
mod factor;
mod files;
mod held;
mod io;
mod layout;
mod memory;
mod mesh;
mod packed;
mod partition;
mod pickle;
mod propagate;
mod reshard;
mod rules;
mod tiling;
mod views;

use pyo3::prelude::*;

use crate::errors::{guard, note_panics};

/// Puts the classes and functions into the module.
///
/// # Errors
/// What Python raises if it has no memory.
pub fn fill(module: &Bound<'_, PyModule>) -> PyResult<()> {
    note_panics();
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<factor::FactorRule>()?;
    module.add_class::<propagate::Computation>()?;
    module.add_class::<propagate::Propagated>()?;
    module.add_class::<held::Held>()?;
    module.add_class::<layout::Layout>()?;
    module.add_class::<mesh::Mesh>()?;
    module.add_class::<packed::PackedPartition>()?;
    module.add_class::<partition::Partition>()?;
    module.add_class::<tiling::BoxTree>()?;
    module.add_class::<tiling::Tiling>()?;
    module.add_class::<reshard::ReshardPlan>()?;
    module.add_class::<collective::CollectiveSearch>()?;
    module.add_class::<rules::RuleSet>()?;
    module.add_class::<rules::Pattern>()?;
    module.add_class::<dtensor::DtensorLayout>()?;
    module.add_class::<dtensor::DtensorMesh>()?;
    module.add_class::<io::CopyJob>()?;
    module.add_class::<files::FileLock>()?;
    module.add_class::<pickle::Persistent>()?;
    module.add_class::<pickle::Record>()?;
    module.add_function(wrap_pyfunction!(assignment::least_assignments, module)?)?;
    module.add_function(wrap_pyfunction!(checksum::crc32c, module)?)?;
    module.add_function(wrap_pyfunction!(checksum::joined_crc, module)?)?;
    module.add_function(wrap_pyfunction!(collective::priced_collectives, module)?)?;
    module.add_function(wrap_pyfunction!(convert::count_fitting, module)?)?;
    module.add_function(wrap_pyfunction!(dtensor::decode_layout, module)?)?;
    module.add_function(wrap_pyfunction!(dtensor::decode_mesh, module)?)?;
    module.add_function(wrap_pyfunction!(dtensor::encode_layout, module)?)?;
    module.add_function(wrap_pyfunction!(dtensor::encode_mesh, module)?)?;
    module.add_function(wrap_pyfunction!(dtensor::parse_device, module)?)?;
    module.add_function(wrap_pyfunction!(dtensor::print_device, module)?)?;
    module.add_function(wrap_pyfunction!(factor::factor_rule, module)?)?;
    module.add_function(wrap_pyfunction!(factor::has_factor_rule, module)?)?;
    module.add_function(wrap_pyfunction!(files::free_space, module)?)?;
    module.add_function(wrap_pyfunction!(io::mapped_files, module)?)?;
    module.add_function(wrap_pyfunction!(files::publish, module)?)?;
    module.add_function(wrap_pyfunction!(files::sync_files, module)?)?;
    module.add_function(wrap_pyfunction!(pickle::read_dcp_index, module)?)?;
    module.add_function(wrap_pyfunction!(pickle::read_pickle, module)?)?;
    module.add_function(wrap_pyfunction!(propagate::propagated, module)?)?;
    module.add_function(wrap_pyfunction!(propagate::settle, module)?)?;
    module.add_function(wrap_pyfunction!(reshard::balance_model, module)?)?;
    module.add_function(wrap_pyfunction!(_panic, module)?)?;
    prepare(module)
}

/// Makes what is otherwise made when it is first needed: names, types, numpy's interface.
///
/// PyO3 makes such a thing under a lock, and lets other threads run meanwhile. A process that they fork has a child in which
/// nobody makes it, and whose first call would wait for it.
fn prepare(module: &Bound<'_, PyModule>) -> PyResult<()> {
    errors::prepare(module.py());
    convert::prepare(module.py())?;
    rules::prepare(module.py())?;
    // PyO3's own, for what is said of a wrong argument.
    drop(module.call_method1("crc32c", (module.py().None(),)));
    Ok(())
}

/// Panics, so that a test can see what a panic becomes.
#[pyfunction]
fn _panic() -> PyResult<()> {
    guard(|| panic!("asked to"))
}
