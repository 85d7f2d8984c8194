//! The refusals of this dialect beyond those of every mesh and layout.

use super::MAX_RANK;
use crate::{
    error::{Error as CoreError, ErrorKind},
    shown,
};

/// The result of functions of this dialect.
pub type Result<T> = std::result::Result<T, Error>;

/// Everything that the DTensor dialect refuses, and why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A refusal of any mesh or layout.
    #[error(transparent)]
    Core(#[from] CoreError),
    /// A text that does not follow its format.
    #[error("{what}, byte {at}: {problem}")]
    Text {
        /// The name of the text.
        what: &'static str,
        /// The byte offset at which it stops making sense.
        at: usize,
        /// The mistake there.
        problem: String,
    },
    /// Bytes that are not the message they should be.
    #[error("{message}, byte {at}: {problem}")]
    Wire {
        /// The name of the message.
        message: &'static str,
        /// The byte offset at which it stops making sense.
        at: usize,
        /// The mistake there.
        problem: String,
    },
    /// A mesh of more axes than an array of its device ids could have.
    #[error("dim_names has {given} names; a mesh has at most {limit} axes, the most dims of a numpy array")]
    TooManyAxes {
        /// The number that was given.
        given: usize,
        /// The most that are allowed.
        limit: usize,
    },
    /// Names and dims of the array of ids that do not pair up.
    #[error(
        "dim_names has {} but global_device_ids has {}",
        shown::counted(names, "name", "names"),
        shown::counted(dims, "dim", "dims")
    )]
    DimCount {
        /// Names given.
        names: usize,
        /// Dims given.
        dims: usize,
    },
    /// A name that the text form could not hold.
    #[error(
        "{what} is {name}, which holds {found:?}; the text form of a mesh uses '|', ',', '=', ':' and NUL itself",
        name = shown::text(name)
    )]
    NameCharacter {
        /// The argument that has the name: `mesh_name`, `dim_names[1]`.
        what: String,
        /// The name.
        name: String,
        /// The character.
        found: char,
    },
    /// An axis name that means something else in a layout.
    #[error(
        "dim_names[{axis}] is {name}, which is reserved: it means something else in a layout",
        name = shown::text(name)
    )]
    ReservedName {
        /// Position of the axis.
        axis: usize,
        /// The name.
        name: String,
    },
    /// A number of global ids that is not the number of devices.
    #[error(
        "global_device_ids has {} but the mesh has {}",
        shown::counted(given, "id", "ids"),
        shown::counted(size, "device", "devices")
    )]
    GlobalIdCount {
        /// Ids given.
        given: usize,
        /// Devices of the mesh.
        size: i64,
    },
    /// Global ids that do not go up by one.
    #[error("global_device_ids must sequentially increase: position {position} has {given}, expected {expected}")]
    GlobalIdGap {
        /// The position of the id, in C order.
        position: usize,
        /// The id there.
        given: i64,
        /// The id that would follow.
        expected: i64,
    },
    /// A first global id below zero.
    #[error("global_device_ids begins with {first}; device ids cannot be negative")]
    NegativeId {
        /// The first id.
        first: i64,
    },
    /// Local ids and local devices that do not pair up.
    #[error(
        "local_device_ids has {} but local_devices has {}",
        shown::counted(ids, "id", "ids"),
        shown::counted(devices, "device", "devices")
    )]
    LocalCount {
        /// Ids given.
        ids: usize,
        /// Devices given.
        devices: usize,
    },
    /// A local id that is not a global id.
    #[error("local_device_ids[{position}] is {id}, which is not one of the global ids {first} to {last}")]
    LocalIdOutside {
        /// The position of the id.
        position: usize,
        /// The id.
        id: i64,
        /// The smallest global id.
        first: i64,
        /// The largest global id.
        last: i64,
    },
    /// A local id given twice.
    #[error("local_device_ids has {id} more than once, at {first} and {second}")]
    LocalIdRepeated {
        /// The id.
        id: i64,
        /// The first position of the id.
        first: usize,
        /// The second position of the id.
        second: usize,
    },
    /// A mesh without a single device name.
    #[error("local_devices and global_devices are both empty; a mesh needs at least one device")]
    NoDevices,
    /// Global devices given, but not one for each position.
    #[error("global_devices has {} but the mesh has {size}", shown::counted(given, "device", "devices"))]
    GlobalDeviceCount {
        /// Devices given.
        given: usize,
        /// Devices of the mesh.
        size: i64,
    },
    /// A text that is not a device name, where one is needed.
    #[error("{what} is {text}, which is not a device name: {problem}", text = shown::text(text))]
    Device {
        /// The argument: `local_devices[2]`, `device`.
        what: String,
        /// The text.
        text: String,
        /// The mistake in it.
        problem: String,
    },
    /// A device name that leaves its type open.
    #[error("{what} is {text}: device_type is required", text = shown::text(text))]
    NoDeviceType {
        /// The argument: `local_devices[2]`, `device`.
        what: String,
        /// The name.
        text: String,
    },
    /// Devices of two types in one mesh.
    #[error(
        "Devices containing multiple device_types: {what} is {text}, of another type than {first}",
        text = shown::text(text),
        first = shown::text(first)
    )]
    MixedTypes {
        /// The argument: `local_devices[2]`.
        what: String,
        /// The name of the device there.
        text: String,
        /// The type of the first device.
        first: String,
    },
    /// One device at two positions.
    #[error(
        "Duplicate devices found in mesh specification: {list}[{first}] and {list}[{second}] are both {text}",
        text = shown::text(text)
    )]
    DuplicateDevice {
        /// The list.
        list: &'static str,
        /// The first position of the device.
        first: usize,
        /// The second position of the device.
        second: usize,
        /// The name of the device there.
        text: String,
    },
    /// XLA SPMD asked for on other devices than TPUs.
    #[error("use_xla_spmd: XLA SPMD is not supported for a {device_type} mesh, only for TPU")]
    XlaSpmd {
        /// The type of the devices.
        device_type: String,
    },
    /// A single-device mesh with what only a mesh of axes has, or an empty mesh with anything.
    #[error("the message of {form} has {field}, which only a mesh with axes has")]
    NotTiled {
        /// `a single-device mesh`, `an empty mesh`.
        form: &'static str,
        /// The field.
        field: &'static str,
    },
    /// A spec that is neither an axis of the mesh nor a special value.
    #[error(
        "sharding_specs[{dim}] is {spec}: A dimension sharding must either be a valid mesh dimension or UNSHARDED. \
         The mesh has {axes}", spec = shown::text(spec), axes = shown::texts(axes))]
    UnknownSpec {
        /// The tensor dim.
        dim: usize,
        /// The spec that was to cut it.
        spec: String,
        /// The names of the mesh.
        axes: Vec<String>,
    },
    /// A mesh axis, or `match`, on two dims.
    #[error(
        "sharding_specs[{second}] is {spec}, the same as sharding_specs[{first}]. Mesh dimensions must be unique in \
         a layout.",
        spec = shown::text(spec)
    )]
    RepeatedSpec {
        /// The spec.
        spec: String,
        /// The dim that has it first.
        first: usize,
        /// The dim that has it again.
        second: usize,
    },
    /// A layout of more dims than a tensor can have.
    #[error("a layout of rank {given}; a tensor has 0 to {MAX_RANK} dims")]
    RankOutside {
        /// The rank given.
        given: i64,
    },
    /// A dim that the layout has not.
    #[error("dim {dim} is outside the layout, which has rank {rank}")]
    DimOutside {
        /// The dim given.
        dim: i64,
        /// The rank.
        rank: usize,
    },
    /// A shard index of another length than the layout's rank.
    #[error("offset_tuple has {} but the layout has rank {rank}", shown::counted(given, "entry", "entries"))]
    IndexRank {
        /// Entries given.
        given: usize,
        /// The rank.
        rank: usize,
    },
    /// A layout whose form does not go with its mesh.
    #[error("{layout} cannot be on {mesh}")]
    WrongMesh {
        /// `a static layout`, ...
        layout: &'static str,
        /// `a single-device mesh`, ...
        mesh: &'static str,
    },
    /// A layout that cuts by nothing definite, where a cut is asked for.
    #[error("sharding_specs[{dim}] is {spec}, which leaves open how the dim is cut", spec = shown::text(spec))]
    Undetermined {
        /// The tensor dim.
        dim: usize,
        /// `match` or `any`.
        spec: &'static str,
    },
    /// A form of layout that has no shards to speak of.
    #[error("{layout} has no shards: it has no axes")]
    NoShards {
        /// `an empty layout`, `a single-device layout`.
        layout: &'static str,
    },
}

impl Error {
    /// The sort of mistake.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Core(error) => error.kind(),
            Self::Text { .. } | Self::Wire { .. } => ErrorKind::Parse,
            Self::UnknownSpec { .. }
            | Self::RepeatedSpec { .. }
            | Self::RankOutside { .. }
            | Self::DimOutside { .. }
            | Self::IndexRank { .. }
            | Self::WrongMesh { .. }
            | Self::Undetermined { .. }
            | Self::NoShards { .. } => ErrorKind::Layout,
            _ => ErrorKind::Mesh,
        }
    }
}
