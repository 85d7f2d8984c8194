//! What is refused of a tensor before anything is done.

use crate::{
    boxes::{find_overlap, shared, volume},
    piece::{Piece, Tensor},
};

pub(crate) fn check_box(tensor: &Tensor, piece: &Piece<'_>) -> std::result::Result<(), String> {
    for dim in 0..tensor.shape.len() - 1 {
        let (start, stop, size) = (piece.start[dim], piece.stop[dim], tensor.shape[dim]);
        if !(0 <= start && start <= stop && stop <= size) {
            return Err(format!("is [{start}, {stop}) along dim {dim}, which is not within [0, {size})"));
        }
    }
    Ok(())
}

/// Checks that a piece lies within its holder; `limits` are the holder's first byte, its end, and whether it is a file.
pub(crate) fn check_span(piece: &Piece<'_>, limits: Option<(i64, i64, bool)>) -> std::result::Result<(), String> {
    let Some((low, high, file)) = limits else {
        return Err(format!("its holder is {}, which is not in the job", piece.holder as i64));
    };
    if piece.volume() == 0 {
        return Ok(());
    }
    if file && piece.strides.iter().zip(piece.start).zip(piece.stop).any(|((&s, a), b)| s < 0 && b - a > 1) {
        return Err("has a negative stride, which only memory can have".to_owned());
    }
    match piece.span() {
        Some((start, stop)) if low <= start && stop <= high => Ok(()),
        Some((start, stop)) => Err(format!("needs bytes {start} to {stop} of its holder, which has {low} to {high}")),
        None => Err("needs bytes beyond 2**63 - 1 of its holder".to_owned()),
    }
}

/// Whether the piece's bytes follow one another in C order in its holder.
pub(crate) fn is_one_run(piece: &Piece<'_>) -> bool {
    let mut bytes = 1;
    for dim in (0..piece.start.len()).rev() {
        let extent = piece.stop[dim] - piece.start[dim];
        if extent > 1 && piece.strides[dim] != bytes {
            return false;
        }
        bytes *= extent.max(1);
    }
    true
}

/// Checks that source pieces do not overlap, and that each destination piece is covered.
pub(crate) fn check_cover(tensor: &Tensor) -> std::result::Result<(), String> {
    let sources: Vec<(&[i64], &[i64])> = tensor.sources.iter().map(|piece| (piece.start, piece.stop)).collect();
    if let Some((a, b)) = find_overlap(&sources) {
        return Err(format!("source pieces {a} and {b} overlap; of replicas, give one"));
    }
    let held: i128 = sources.iter().map(|(start, stop)| i128::from(volume(start, stop))).sum();
    if !tensor.shape.contains(&0) && held == i128::from(tensor.shape[0]) * i128::from(tensor.strides[0]) {
        return Ok(());
    }
    for (index, piece) in tensor.destinations.iter().enumerate() {
        let needed = piece.volume();
        let covered: i64 = sources.iter().map(|(start, stop)| shared(piece.start, piece.stop, start, stop)).sum();
        if covered != needed {
            let item = tensor.itemsize;
            return Err(format!(
                "destination piece {index} has {} elements, of which the source pieces hold {}",
                needed / item,
                covered / item
            ));
        }
    }
    Ok(())
}

/// A shape of which no more is shown than a message has room for.
pub(crate) fn short(shape: &[i64]) -> String {
    if shape.len() <= 8 { format!("{shape:?}") } else { format!("{:?} … ({} dims)", &shape[..8], shape.len()) }
}
