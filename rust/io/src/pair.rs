//! The part that a source piece and a destination piece share: how its bytes are fetched, and where
//! they are put.

use shardwise_core::{
    region::{Region, RegionBuf},
    short,
};

use crate::{
    piece::{Piece, Tensor},
    strided::{Dim, collapsed},
};

/// The most bytes between two runs for which one read over both is cheaper than two: what a call costs is what the page
/// cache delivers in half a microsecond.
pub(crate) const GAP: i64 = 4096;

/// The least length of a run that is read to where it belongs, whatever else is read beside it.
const LONG: i64 = 64 * 1024;

/// From here on, runs that are far apart are read to where they belong, each by a call of its own: a call costs no more
/// than the copy that it saves.
const WORTH_A_CALL: i64 = 512;

/// The part of a file piece that a slot needs, as reads.
#[derive(Debug)]
pub(crate) struct Fetch {
    /// The positions of the blocks: in the file, and in the slot.
    pub(crate) outer: Vec<Dim>,
    /// Bytes of a block, with what lies between its runs.
    pub(crate) block: i64,
    /// The runs of a block: in the block, and in the slot.
    pub(crate) inner: Vec<Dim>,
    /// Bytes of a run.
    pub(crate) run: i64,
    /// True if each block is one run that is read to where it belongs.
    pub(crate) direct: bool,
    /// The range of the file: its first byte, and one past the last.
    pub(crate) span: (i64, i64),
    /// The offset in the slot of the first byte, from where the box's first element goes.
    pub(crate) to: i64,
    /// True if blocks would be longer if the limit were larger: of a smaller box they would not be
    /// so many.
    pub(crate) cramped: bool,
}

impl Fetch {
    /// The box `bounds` of a piece, to go to memory with these strides; in blocks of no more than `limit` bytes.
    /// `alone` if no other pair reads from the piece. Dims with a negative stride, as memory may have them, are read
    /// from their last position to their first.
    pub(crate) fn new(piece: &Piece<'_>, bounds: Region<'_>, to: &[i64], limit: i64, alone: bool) -> Self {
        let (mut first, mut shift) = (piece.at(bounds.start()), 0);
        let dims = (0..to.len()).map(|dim| {
            let (extent, from, to) = (bounds.extent(dim), piece.strides[dim], to[dim]);
            if from >= 0 || extent <= 1 {
                return Dim { extent, from, to };
            }
            first += (extent - 1) * from;
            shift += (extent - 1) * to;
            Dim { extent, from: -from, to: -to }
        });
        let (mut outer, run) = collapsed(dims);
        let (mut block, mut inner, mut cramped) = (run, Vec::new(), false);
        while let Some(dim) = outer.last() {
            let longer = (dim.extent - 1) * dim.from + block;
            if dim.from > block + GAP {
                break;
            }
            if longer > limit {
                cramped = true;
                break;
            }
            block = longer;
            inner.extend(outer.pop());
        }
        inner.reverse();
        let reach: i64 = outer.iter().map(|dim| (dim.extent - 1) * dim.from).sum();
        let direct = inner.is_empty() && (run >= LONG || (alone && run >= WORTH_A_CALL && !outer.is_empty()));
        let cramped = cramped && run < LONG;
        Self { outer, block, inner, run, direct, span: (first, first + reach + block), to: shift, cramped }
    }

    /// The number of blocks.
    pub(crate) fn blocks(&self) -> i64 {
        self.outer.iter().map(|dim| dim.extent).product()
    }
}

/// The most parts of a piece of which it is looked which of them overlap; more are taken together
/// or singly.
const FEW: usize = 64;

/// Parts of a source piece, by their numbers, and the box around them. If it is read as a whole, once, each part is
/// copied from there: where bytes are wanted more than once, or in runs so short that it costs less.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) bounds: RegionBuf,
    pub(crate) parts: Vec<usize>,
    pub(crate) together: bool,
}

/// The parts of a source piece that destinations want, in groups, each part in one.
pub(crate) fn groups(piece: &Piece<'_>, parts: &[RegionBuf]) -> Vec<Group> {
    let around = |chosen: &[usize]| {
        let mut bounds = parts[chosen[0]].clone();
        chosen.iter().for_each(|&part| bounds.include(parts[part].region()));
        bounds
    };
    let volume = |chosen: &[usize]| chosen.iter().map(|&part| i128::from(parts[part].region().volume())).sum::<i128>();
    let all: Vec<usize> = (0..parts.len()).collect();
    if parts.len() > 1 {
        let bounds = around(&all);
        let (wanted, whole) = (volume(&all), i128::from(bounds.region().volume()));
        if wanted > whole || (wanted == whole && run_of(piece, parts[0].region()) < WORTH_A_CALL) {
            return vec![Group { bounds, parts: all, together: true }];
        }
    }
    let mut found: Vec<Group> = Vec::with_capacity(parts.len());
    for part in all {
        let mut group = Group { bounds: parts[part].clone(), parts: vec![part], together: false };
        let overlaps = |other: &Group| other.bounds.region().meets(group.bounds.region());
        if let Some(at) = (found.len() <= FEW).then(|| found.iter().position(overlaps)).flatten() {
            group.parts.extend(&found[at].parts);
            group.bounds = around(&group.parts);
            // No more is read than if each were read for itself.
            if volume(&group.parts) >= i128::from(group.bounds.region().volume()) {
                group.together = true;
                found.swap_remove(at);
            } else {
                group = Group { bounds: parts[part].clone(), parts: vec![part], together: false };
            }
        }
        found.push(group);
    }
    found
}

/// The bytes of a box of a piece that follow one another in its holder.
fn run_of(piece: &Piece<'_>, bounds: Region<'_>) -> i64 {
    let dims = (0..bounds.rank()).map(|dim| Dim {
        extent: bounds.extent(dim),
        from: piece.strides[dim],
        to: piece.strides[dim],
    });
    collapsed(dims).1
}

/// The strides of a buffer that holds the box `bounds` densely, its dims in the order that they have in the holder, so
/// that what is one run there is one run here.
pub(crate) fn dense_strides(order: &[i64], bounds: Region<'_>) -> Vec<i64> {
    let mut dims: Vec<usize> = (0..order.len()).collect();
    short::sort_by_key(&mut dims, |&dim| (order[dim].abs(), std::cmp::Reverse(dim)));
    let mut strides = vec![1; order.len()];
    let mut bytes = 1;
    for dim in dims {
        strides[dim] = bytes;
        bytes *= bounds.extent(dim);
    }
    strides
}

/// The dim along which a box is halved: the outermost one of both pieces. Where they disagree (a transposition), the
/// longer of the two, which keeps the runs of both sides equally long.
pub(crate) fn dim_to_split(tensor: &Tensor, bounds: Region<'_>, from: Option<&Piece<'_>>, to: &Piece<'_>) -> usize {
    let outermost = |strides: &[i64]| {
        let long = (0..strides.len()).filter(|&dim| bounds.extent(dim) > 1);
        long.max_by_key(|&dim| (strides[dim].abs(), std::cmp::Reverse(dim))).unwrap_or(0)
    };
    let a = outermost(from.map_or(&tensor.strides, |piece| piece.strides));
    let b = outermost(to.strides);
    if bounds.extent(a) >= bounds.extent(b) { a } else { b }
}
