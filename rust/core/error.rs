//! The one error type of the core: each variant carries what was given and the limit it broke.

use thiserror::Error;

use crate::shown;

/// The result of functions of the core.
pub type Result<T> = std::result::Result<T, Error>;

/// Everything that the core refuses, and why.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Error {
    /// A mesh of no axes.
    #[error("axis_names: a mesh needs at least one axis, got none")]
    NoAxes,
    /// Names and sizes that do not pair up.
    #[error(
        "shape has {} but axis_names has {}",
        shown::counted(sizes, "axis size", "axis sizes"),
        shown::counted(names, "name", "names")
    )]
    AxisCount {
        /// The number of names that were given.
        names: usize,
        /// The number of sizes that were given.
        sizes: usize,
    },
    /// An axis without a name.
    #[error("axis_names[{axis}] is empty; every mesh axis needs a name")]
    EmptyAxisName {
        /// Position of the axis.
        axis: usize,
    },
    /// One name on two axes.
    #[error("axis_names[{second}] is {name}, the same as axis_names[{first}]", name = shown::text(name))]
    DuplicateAxisName {
        /// The name.
        name: String,
        /// The first position of the name.
        first: usize,
        /// The second position of the name.
        second: usize,
    },
    /// An axis size below one.
    #[error("shape[{axis}] (axis {name}) is {size}; an axis size must be at least 1", name = shown::text(name))]
    AxisSize {
        /// Position of the axis.
        axis: usize,
        /// The name of the axis.
        name: String,
        /// The size given.
        size: i64,
    },
    /// A position outside the mesh.
    #[error(
        "device index {index} is outside the mesh, which has {} (0 to {})",
        shown::counted(size, "device", "devices"),
        size - 1
    )]
    DeviceIndex {
        /// The index given.
        index: i64,
        /// The number of devices.
        size: i64,
    },
    /// A coordinate with another number of entries than the mesh has axes.
    #[error(
        "coordinate has {} but the mesh has {}",
        shown::counted(given, "entry", "entries"),
        shown::counted(axes, "axis", "axes")
    )]
    CoordinateRank {
        /// Entries given.
        given: usize,
        /// Axes of the mesh.
        axes: usize,
    },
    /// A coordinate entry outside its axis.
    #[error("coordinate[{axis}] (axis {name}) is {given}, outside 0 to {}", size - 1, name = shown::text(name))]
    Coordinate {
        /// Position of the axis.
        axis: usize,
        /// The name of the axis.
        name: String,
        /// The entry given.
        given: i64,
        /// The axis size.
        size: i64,
    },
    /// A layout that names an axis which the mesh has not.
    #[error(
        "{place} names axis {name}, which the mesh does not have; its axes are {axes}{meant}",
        name = shown::text(name),
        axes = shown::texts(axes),
        meant = if matches!(name.as_str(), "None" | "none" | "null" | "-") {
            "; for a dim that is not cut write None, without quotes".to_owned()
        } else {
            shown::meant(name, axes)
        }
    )]
    UnknownAxis {
        /// The place: `axes[1]`, `unreduced`.
        place: String,
        /// The name given.
        name: String,
        /// The names of the mesh.
        axes: Vec<String>,
    },
    /// A mesh axis used twice in a layout.
    #[error(
        "{place} uses axis {name}, which {first} uses already; a mesh axis cuts at most one dim, once",
        name = shown::text(name)
    )]
    RepeatedAxis {
        /// The second place.
        place: String,
        /// The name.
        name: String,
        /// The first place.
        first: String,
    },
    /// A sub-axis that its axis does not have.
    #[error(
        "{place} names {name}, which does not divide axis {axis} of size {size}",
        name = shown::text(name),
        axis = shown::text(axis)
    )]
    SubAxisSize {
        /// The place: `axes[1]`, `unreduced`.
        place: String,
        /// The sub-axis.
        name: String,
        /// The axis that it is part of.
        axis: String,
        /// The size of the axis.
        size: i64,
    },
    /// Two uses of one axis that share a factor of it.
    #[error(
        "{place} uses axis {name}, which overlaps {other} in {first}; \
         a part of a mesh axis cuts at most one dim, once",
        name = shown::text(name),
        other = shown::text(other)
    )]
    OverlappingAxes {
        /// The place of the second.
        place: String,
        /// The second.
        name: String,
        /// The place of the first.
        first: String,
        /// The first.
        other: String,
    },
    /// Sub-axes of one axis that have no common refinement.
    #[error(
        "sub-axes of {axis} cannot be combined: they have boundaries at {first} and {second}, and neither divides \
         the other",
        axis = shown::text(axis)
    )]
    SubAxesClash {
        /// The axis.
        axis: String,
        /// The start or the end of the one.
        first: i64,
        /// The start or the end of the other.
        second: i64,
    },
    /// A shape of another rank than the layout.
    #[error("shape has {} but the layout has {rank}", shown::counted(given, "dim", "dims"))]
    Rank {
        /// Dims of the shape.
        given: usize,
        /// Dims of the layout.
        rank: usize,
    },
    /// A dim below zero.
    #[error("shape[{dim}] is {size}; a dim must be at least 0")]
    NegativeDim {
        /// Position of the dim.
        dim: usize,
        /// The size given.
        size: i64,
    },
    /// A dim that does not divide, under the rule `"even"`.
    #[error(
        "dim {dim} has {}, which {k} shards do not divide evenly; \
         uneven=\"ceil\", \"chunk\", \"balanced\" or \"floor\" would cut it",
        shown::counted(n, "element", "elements")
    )]
    Indivisible {
        /// Position of the dim.
        dim: usize,
        /// The elements of the dim.
        n: i64,
        /// The shards along it.
        k: i64,
    },
    /// Too few parts of a packed dim, or too many.
    #[error("axes[{dim}] is packed from {given} parts; a packed dim has 1 to {limit}")]
    Parts {
        /// Position of the dim.
        dim: usize,
        /// The parts given.
        given: usize,
        /// The most there may be.
        limit: usize,
    },
    /// A part of a packed dim that cannot be.
    #[error("axes[{dim}], part {part} {why}")]
    Part {
        /// Position of the dim.
        dim: usize,
        /// Position of the part.
        part: usize,
        /// The mistake in it.
        why: String,
    },
    /// A layout with packed dims where one without is needed.
    #[error("layout has packed dims, whose shards may have several pieces")]
    PackedLayout,
    /// Parts that do not add up to their dim.
    #[error("dim {dim} has {}, but its parts add up to {sum}", shown::counted(n, "element", "elements"))]
    PartsSum {
        /// Position of the dim.
        dim: usize,
        /// The elements of the dim.
        n: i64,
        /// The elements of the parts.
        sum: i64,
    },
    /// Parts that no size of their unknown factor makes add up to their dim.
    #[error(
        "dim {dim} has {}, and the parts of known size take {known}; the rest cannot be filled: \
         each unit of the unknown factor takes {per_unit}",
        shown::counted(n, "element", "elements")
    )]
    FreeFactor {
        /// Position of the dim.
        dim: usize,
        /// The elements of the dim.
        n: i64,
        /// The elements of the parts without the factor.
        known: i64,
        /// The elements of the other parts if the factor is 1.
        per_unit: i64,
    },
    /// A part whose cut factor does not divide, under the rule `"even"`.
    #[error(
        "dim {dim}, part {part}: the factor that is cut is {n}{}, which {k} shards do not divide evenly",
        if *unit == 1 { String::new() } else { format!(", that is {} of {unit}", shown::counted(&(n / unit + i64::from(n % unit != 0)), "unit", "units")) }
    )]
    PartIndivisible {
        /// Position of the dim.
        dim: usize,
        /// Position of the part.
        part: usize,
        /// The cut factor.
        n: i64,
        /// The number of its elements that stay together.
        unit: i64,
        /// The shards.
        k: i64,
    },
    /// An unknown rule name.
    #[error(
        "uneven is {given}; the rules are \"even\", \"ceil\", \"chunk\", \"balanced\" and \"floor\"",
        given = shown::text(given)
    )]
    UnknownRule {
        /// The name given.
        given: String,
    },
    /// A size or a product of sizes over the limit of 2^63 - 1.
    #[error("{what} is over the limit of 9223372036854775807 (2**63 - 1)")]
    Overflow {
        /// The number that was to be computed, with its values.
        what: String,
    },
    /// More values than there is memory for.
    #[error("{what} are more than there is memory for")]
    TooMany {
        /// The values, with their number.
        what: String,
    },
    /// A number outside its range; `position` is set when it is one of many.
    #[error(
        "{what}{} is {value}, {}",
        position.map(|i| format!("[{i}]")).unwrap_or_default(),
        if *limit == 0 { "but the valid range is empty".to_owned() } else { format!("outside 0 to {}", limit - 1) }
    )]
    OutOfRange {
        /// The argument.
        what: &'static str,
        /// The position in it, in C order.
        position: Option<usize>,
        /// The number given.
        value: i64,
        /// One more than the largest allowed.
        limit: i64,
    },
    /// A place in a shard that is padding.
    #[error(
        "local_offsets{} is {local}, which is padding in shard {shard}",
        position.map(|i| format!("[{i}]")).unwrap_or_default()
    )]
    Padding {
        /// The position in the argument, in C order.
        position: Option<usize>,
        /// The shard.
        shard: i64,
        /// The offset in it.
        local: i64,
    },
    /// Two arguments, or an argument and an output, whose lengths must be equal.
    #[error("{left} has {} but {right} has {right_len}", shown::counted(left_len, "element", "elements"))]
    Length {
        /// The first argument.
        left: &'static str,
        /// The length of the first.
        left_len: usize,
        /// The second argument, or the output.
        right: &'static str,
        /// The length of the second.
        right_len: usize,
    },
    /// Two partitions of different shapes.
    #[error(
        "src is of shape {given} but dst of {destination}; a plan is between tilings of one shape",
        given = shown::list(given),
        destination = shown::list(destination)
    )]
    Shapes {
        /// The source's shape.
        given: Vec<i64>,
        /// The destination's.
        destination: Vec<i64>,
    },
    /// A destination of partial sums.
    #[error("dst is unreduced over {axes}; a value cannot be cut into partial sums", axes = shown::texts(axes))]
    UnreducedDestination {
        /// The axes.
        axes: Vec<String>,
    },
    /// A box that is not within the tensor.
    #[error(
        "holders[{holder}]: its box{} is [{start}, {stop}) along dim {dim}, which is not within [0, {size})",
        if *piece == 0 { String::new() } else { format!(" {piece}") }
    )]
    BoxBounds {
        /// The holder of the box.
        holder: usize,
        /// The number of the box among the holder's.
        piece: usize,
        /// The dim in which it is wrong.
        dim: usize,
        /// The start of the box in the dim.
        start: i64,
        /// The stop of the box in the dim.
        stop: i64,
        /// The elements of the dim.
        size: i64,
    },
    /// A range that is not within the flattened tensor.
    #[error("holders[{holder}]: its range is [{start}, {stop}), which is not within [0, {size})")]
    FlatRange {
        /// The holder of the range.
        holder: usize,
        /// The start of the range.
        start: i64,
        /// The stop of the range.
        stop: i64,
        /// The elements of the tensor.
        size: i64,
    },
    /// Boxes that do not fit into their holder's array.
    #[error("holders[{holder}] {what}")]
    Places {
        /// The holder.
        holder: usize,
        /// The mistake in them.
        what: String,
    },
    /// A grid whose chunks are of another rank than the tensor.
    #[error("chunks has {} but shape has {rank}", shown::counted(given, "dim", "dims"))]
    Chunks {
        /// Dims of the chunks.
        given: usize,
        /// Dims of the shape.
        rank: usize,
    },
    /// A chunk without elements.
    #[error("chunks[{dim}] is {size}; a chunk must have at least 1 element")]
    ChunkSize {
        /// The dim.
        dim: usize,
        /// The length given.
        size: i64,
    },
    /// Two boxes that share elements.
    #[error("{} overlap: both hold {}", holders_text(*first, *second), box_text(start, stop))]
    BoxesOverlap {
        /// The holder of the one.
        first: i64,
        /// The holder of the other.
        second: i64,
        /// The start of the common part.
        start: Vec<i64>,
        /// The stop of the common part.
        stop: Vec<i64>,
    },
    /// One box asked for, where a device has several.
    #[error(
        "device index {device} holds {count} pieces, not one box; pieces(device) gives them, all_pieces() those of all \
         devices"
    )]
    ManyPieces {
        /// The device.
        device: i64,
        /// The number that it has.
        count: i64,
    },
    /// Elements that no box holds.
    #[error("the boxes leave a gap: none holds {}", box_text(start, stop))]
    BoxMissing {
        /// The start of the gap.
        start: Vec<i64>,
        /// The stop of the gap.
        stop: Vec<i64>,
    },
    /// Elements that a plan's destination asks for, and its source does not hold.
    #[error("src does not hold {}, which holders[{holder}] of dst needs", box_text(start, stop))]
    NotHeld {
        /// The holder that asks for them.
        holder: usize,
        /// The start of the elements.
        start: Vec<i64>,
        /// The stop of the elements.
        stop: Vec<i64>,
    },
    /// A pickle that stops making sense, or asks for what is not read.
    #[error("byte {at} of the pickle: {problem}")]
    Pickle {
        /// The byte offset.
        at: usize,
        /// The mistake there.
        problem: String,
    },
    /// A collective that cannot be made where it stands in a sequence.
    #[error("steps[{number}], {kind}: {problem}")]
    Collective {
        /// The position of the collective.
        number: usize,
        /// The name of its kind.
        kind: &'static str,
        /// The reason.
        problem: String,
    },
    /// The index of a distributed checkpoint that is not one.
    #[error("{problem}")]
    PickledIndex {
        /// The mistake in it.
        problem: String,
    },
    /// A sender that does not hold what it is to send.
    #[error("senders[{position}] is {holder}, which does not hold {text}")]
    Sender {
        /// The position of the transfer.
        position: usize,
        /// The sender given.
        holder: i64,
        /// The box.
        text: String,
    },
    /// An op that is not known, or whose attributes or shapes are not such an op's.
    #[error("op {op}: {why}", op = shown::text(op))]
    Op {
        /// The name of the op.
        op: String,
        /// The fault.
        why: String,
    },
    /// A factor rule that is not one, or does not fit the shapes of an op.
    #[error("factor rule {rule}: {why}", rule = shown::text(rule))]
    FactorRule {
        /// The text of the rule.
        rule: String,
        /// The fault.
        why: String,
    },
    /// A budget below one element.
    #[error(
        "max_bytes_in_flight is {given}; it must hold at least one element of {}",
        shown::counted(itemsize, "byte", "bytes")
    )]
    Budget {
        /// The budget given, in bytes.
        given: i64,
        /// The bytes of an element.
        itemsize: i64,
    },
    /// A destination whose elements share memory with one another.
    #[error("out[{index}] overlaps itself in memory (a zero stride?), so it cannot be written")]
    OverlapsItself {
        /// The position of the destination.
        index: usize,
    },
    /// A destination that shares memory with a source or another destination.
    #[error("out[{index}] shares memory with {other}[{position}], so writing the one would change the other")]
    OverlapsOther {
        /// The position of the destination.
        index: usize,
        /// `out` or `src_shards`.
        other: &'static str,
        /// The position there.
        position: usize,
    },
    /// The caller's poll asked to stop; what was to be written is unspecified.
    #[error("interrupted")]
    Interrupted,
    /// A worker thread panicked.
    #[error("a worker thread panicked: {0}")]
    WorkerPanicked(String),
}

/// A box as numpy would write it: `[0:4, 2:6]`, cut short if it has many dims.
pub(crate) fn box_text(start: &[i64], stop: &[i64]) -> String {
    const MOST: usize = 16;
    let sides: Vec<_> = start.iter().zip(stop).take(MOST).map(|(start, stop)| format!("{start}:{stop}")).collect();
    format!("[{}{}]", sides.join(", "), if start.len() > MOST { ", …" } else { "" })
}

/// The holders of two boxes.
fn holders_text(first: i64, second: i64) -> String {
    if first == second {
        format!("two boxes of holders[{first}]")
    } else {
        format!("holders[{first}] and holders[{second}]")
    }
}

/// The sort of mistake that an [`Error`] is; bindings choose their exception by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The mesh, or a device of it.
    Mesh,
    /// The layout or the partition.
    Layout,
    /// A text or a message that does not follow its format.
    Parse,
    /// A size over 2^63 - 1.
    Overflow,
    /// More values than memory can hold.
    Memory,
    /// A position outside its range.
    Index,
    /// The caller asked to stop.
    Interrupted,
    /// A fault of this crate.
    Internal,
}

impl Error {
    /// The sort of mistake.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NoAxes
            | Self::AxisCount { .. }
            | Self::EmptyAxisName { .. }
            | Self::DuplicateAxisName { .. }
            | Self::AxisSize { .. }
            | Self::CoordinateRank { .. } => ErrorKind::Mesh,
            Self::UnknownAxis { .. }
            | Self::RepeatedAxis { .. }
            | Self::SubAxisSize { .. }
            | Self::OverlappingAxes { .. }
            | Self::SubAxesClash { .. }
            | Self::Parts { .. }
            | Self::PackedLayout
            | Self::Part { .. }
            | Self::PartsSum { .. }
            | Self::FreeFactor { .. }
            | Self::PartIndivisible { .. }
            | Self::Rank { .. }
            | Self::NegativeDim { .. }
            | Self::Indivisible { .. }
            | Self::UnknownRule { .. }
            | Self::Length { .. }
            | Self::Shapes { .. }
            | Self::UnreducedDestination { .. }
            | Self::BoxBounds { .. }
            | Self::FlatRange { .. }
            | Self::Places { .. }
            | Self::Chunks { .. }
            | Self::ChunkSize { .. }
            | Self::NotHeld { .. }
            | Self::Sender { .. }
            | Self::BoxesOverlap { .. }
            | Self::BoxMissing { .. }
            | Self::ManyPieces { .. }
            | Self::Collective { .. }
            | Self::Op { .. }
            | Self::FactorRule { .. }
            | Self::Budget { .. }
            | Self::OverlapsItself { .. }
            | Self::OverlapsOther { .. } => ErrorKind::Layout,
            Self::Pickle { .. } | Self::PickledIndex { .. } => ErrorKind::Parse,
            Self::Overflow { .. } => ErrorKind::Overflow,
            Self::TooMany { .. } => ErrorKind::Memory,
            Self::DeviceIndex { .. } | Self::Coordinate { .. } | Self::OutOfRange { .. } | Self::Padding { .. } => {
                ErrorKind::Index
            }
            Self::Interrupted => ErrorKind::Interrupted,
            Self::WorkerPanicked(_) => ErrorKind::Internal,
        }
    }
}
