//! The compiled module `shardwise._core`: it converts arguments, calls the core, and converts the answers back.

mod arrays;
mod checksum;
mod collective;
mod convert;
mod dtensor;
mod errors;
mod io;
mod layout;
mod memory;
mod mesh;
mod packed;
mod partition;
mod pickle;
mod reshard;
mod rules;
mod tiling;
mod views;

use pyo3::prelude::*;

/// The compiled part of shardwise.
#[pymodule(gil_used = false)]
mod _core {
    use super::{
        Bound, PyModule, PyResult,
        errors::{guard, note_panics},
        pyfunction,
    };

    #[pymodule_init]
    fn init(_module: &Bound<'_, PyModule>) -> PyResult<()> {
        note_panics();
        Ok(())
    }

    #[pymodule_export]
    use super::dtensor::{
        DtensorLayout, DtensorMesh, decode_layout, decode_mesh, encode_layout, encode_mesh, parse_device, print_device,
    };

    #[pymodule_export]
    use super::io::{_fail_at, _operations, CopyJob, FileLock, free_space, publish, sync_files, write_file};

    #[pymodule_export]
    use super::{layout::Layout, mesh::Mesh, packed::PackedPartition, partition::Partition, rules::RuleSet};

    #[pymodule_export]
    use super::reshard::{ReshardPlan, balance_model};

    #[pymodule_export]
    use super::collective::{CollectiveSearch, priced_collectives};

    #[pymodule_export]
    use super::tiling::Tiling;

    #[pymodule_export]
    use super::checksum::crc32c;

    #[pymodule_export]
    use super::pickle::{Persistent, Record, read_dcp_index, read_pickle};

    /// The version of the package.
    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "the name that Python's packages give it")]
    const __version__: &str = env!("CARGO_PKG_VERSION");

    /// Panics, so that a test can see what a panic becomes.
    #[pyfunction]
    fn _panic() -> PyResult<()> {
        guard(|| panic!("asked to"))
    }
}
