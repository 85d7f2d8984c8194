//! The reason why a change of layout is not a sequence of collectives.

use crate::shown;

/// The reason why a change of layout is not a sequence of collectives.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Obstacle {
    /// Meshes of different sizes.
    #[error("src is on {} and dst on {destination_size}", shown::counted(source_size, "device", "devices"))]
    DeviceCount {
        /// The devices of the source's mesh.
        source_size: i64,
        /// The devices of the destination's mesh.
        destination_size: i64,
    },
    /// Meshes of equal size with different devices.
    #[error("device {position} of the mesh of dst is not in the mesh of src")]
    Devices {
        /// The index of the first device that the source's mesh has not.
        position: usize,
    },
    /// One set of devices, in orders that no change of axes explains.
    #[error("no reordering of axes or sub-axes turns the device order of src into that of dst")]
    DeviceOrder,
    /// One list of devices, in axes without common sub-axes.
    #[error(
        "the meshes have no common sub-axes: {source_shape:?} and {destination_shape:?} cut the devices at different places"
    )]
    NoCommonSubAxes {
        /// The sizes of the source's axes.
        source_shape: Vec<i64>,
        /// The sizes of the destination's.
        destination_shape: Vec<i64>,
    },
    /// A dim that its shards do not divide.
    #[error(
        "dim {dim} of {side} has {}, which {k} shards do not divide evenly",
        shown::counted(n, "element", "elements")
    )]
    Indivisible {
        /// `src` or `dst`.
        side: &'static str,
        /// The dim.
        dim: usize,
        /// The elements of the dim.
        n: i64,
        /// The shards along the dim.
        k: i64,
    },
    /// A destination of partial sums.
    #[error("dst is unreduced; a value cannot be cut into partial sums")]
    UnreducedDestination,
}

impl Obstacle {
    /// A word for each, for programs to tell them apart.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::DeviceCount { .. } => "device-count",
            Self::Devices { .. } => "devices",
            Self::DeviceOrder => "device-order",
            Self::NoCommonSubAxes { .. } => "no-common-sub-axes",
            Self::Indivisible { .. } => "indivisible",
            Self::UnreducedDestination => "unreduced-destination",
        }
    }
}
