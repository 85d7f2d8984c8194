//! Where a plan's boxes lie in the arrays that it is run on.

use std::ops::Range;

use crate::{
    copy::{
        blocks::{Copies, Side},
        overlap::Disjoint,
        strided::Strided,
    },
    error::{Error, Result},
    plan::{
        Plan, Transfer,
        places::{Places, Window},
    },
    tiling::Poll,
};

/// Both sides of a plan.
pub(super) struct Sides<'p> {
    pub(super) from: Holders<'p>,
    pub(super) to: Holders<'p>,
}

impl<'p> Sides<'p> {
    pub(super) fn new([from, to]: [&'p Places; 2], regions: Disjoint<'_>, outputs: &[Option<usize>]) -> Result<Self> {
        Ok(Self {
            from: Holders::new(from, regions.sources(), Some)?,
            to: Holders::new(to, regions.destinations(), |device| outputs[device])?,
        })
    }

    /// What the boxes are copied from and to: the arrays, or the parts of them that the pieces are seen in.
    pub(super) fn views<'a>(&'a self, regions: Disjoint<'a>, poll: Poll<'_>) -> Result<Disjoint<'a>> {
        if self.from.views.is_empty() && self.to.views.is_empty() {
            return Ok(regions);
        }
        let of =
            |side: &'a Holders<'p>, arrays: &'a [Strided]| if side.views.is_empty() { arrays } else { &side.views };
        Disjoint::new(of(&self.from, regions.sources()), of(&self.to, regions.destinations()), poll)
    }

    /// The plan's boxes for some of the destination devices.
    pub(super) fn collect<'a>(
        &self,
        plan: &Plan,
        regions: Disjoint<'a>,
        outputs: &[Option<usize>],
        devices: Range<usize>,
        poll: Poll<'_>,
    ) -> Result<Copies<'a>> {
        // About: a transfer more or less makes the list grow.
        let share = plan.transfers().div_ceil(outputs.len().max(1)) * devices.len();
        let kept = plan.kept().div_ceil(outputs.len().max(1)) * devices.len();
        let mut copies = Copies::new(regions, share + kept)?;
        let mut collect = |transfer: Transfer<'_>| {
            if plan.addend_of(transfer.source) != 0 {
                return Ok(());
            }
            self.add(transfer, outputs, 0, &mut copies)
        };
        plan.visit_kept(devices.clone(), &mut collect)?;
        plan.visit_transfers(devices, poll, collect)?;
        Ok(copies)
    }

    /// Adds the box of a transfer, if its destination has an array; `stream` as for [`Copies::push`].
    #[inline(always)]
    pub(super) fn add(
        &self,
        transfer: Transfer<'_>,
        outputs: &[Option<usize>],
        stream: usize,
        copies: &mut Copies<'_>,
    ) -> Result<()> {
        let Some(output) = outputs[transfer.destination as usize] else { return Ok(()) };
        let (source, have) = self.from.piece(transfer.source, transfer.source_piece, transfer.source as usize);
        let (output, want) = self.to.piece(transfer.destination, transfer.destination_piece, output);
        let sides = (transfer.region.sides().zip(have).zip(want)).map(|(((start, stop), have), want)| Side {
            from: start - have,
            to: start - want,
            extent: stop - start,
        });
        copies.push(source, output, stream, sides)
    }
}

/// Where the pieces of one side lie in the holders' arrays.
pub(super) struct Holders<'p> {
    places: &'p Places,
    /// If an array is flat: what the pieces are seen in, which is a flat piece's part of the array, in its shape, or else
    /// the array itself.
    views: Vec<Strided>,
    /// The view of each piece.
    of_piece: Vec<usize>,
}

impl<'p> Holders<'p> {
    /// `array` says which of `arrays` a holder has, if any.
    fn new(places: &'p Places, arrays: &[Strided], array: impl Fn(usize) -> Option<usize>) -> Result<Self> {
        let (mut views, mut of_piece) = (Vec::new(), Vec::new());
        if places.has_flat() {
            let too_many = |_| Error::TooMany { what: "the views of flat arrays".to_owned() };
            of_piece.try_reserve_exact(places.pieces().len()).map_err(too_many)?;
            for holder in 0..places.pieces().holders() {
                let whole = array(holder).and_then(|at| arrays.get(at));
                let mut is_seen_whole = false;
                for piece in 0..places.pieces().of_holder(holder).len() {
                    let Some(whole) = whole else {
                        of_piece.push(usize::MAX);
                        continue;
                    };
                    let window = places.window(holder as i64, piece as i64);
                    if window != Window::Whole || !is_seen_whole {
                        views.try_reserve(1).map_err(too_many)?;
                        views.push(seen(whole, window)?);
                        is_seen_whole = window == Window::Whole;
                    }
                    of_piece.push(views.len() - 1);
                }
            }
        }
        Ok(Self { places, views, of_piece })
    }

    /// What a piece is seen in, and the position in the tensor of its position 0; `array` is the holder's.
    pub(super) fn piece(&self, holder: i64, piece: i64, array: usize) -> (usize, &[i64]) {
        let view = match self.of_piece.is_empty() {
            true => array,
            false => self.of_piece[self.places.pieces().position(holder, piece)],
        };
        (view, self.places.origin(holder, piece))
    }

    /// The bytes of the pieces of the holders that have an array.
    pub(super) fn bytes(&self, arrays: &[Option<usize>], itemsize: usize) -> i64 {
        let pieces = self.places.pieces();
        let held = arrays.iter().enumerate().filter(|(_, array)| array.is_some());
        let volumes = held.flat_map(|(holder, _)| pieces.of_holder(holder)).map(|at| pieces.regions().get(at).volume());
        volumes.fold(0_i64, i64::saturating_add).saturating_mul(itemsize as i64)
    }
}

/// An array as a piece of it is seen.
fn seen(whole: &Strided, window: Window<'_>) -> Result<Strided> {
    let Window::Flat { offset, piece } = window else { return Ok(whole.clone()) };
    let extents: Vec<i64> = piece.extents().collect();
    whole.shaped(offset, &extents).ok_or_else(|| Error::OutOfRange {
        what: "the end of a piece in a flat array",
        position: None,
        value: offset.saturating_add(piece.volume()),
        limit: whole.dims().first().map_or(0, |dim| dim.0).saturating_add(1),
    })
}
