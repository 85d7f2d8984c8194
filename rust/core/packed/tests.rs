//! Everything that a packed partition answers, against lists of positions made as the rule says.

use std::sync::Arc;

use super::{Packed, runs::PackedRuns};
use crate::{
    error::{Error, Result},
    layout::Layout,
    mesh::Mesh,
    parallel::never,
    partition::Partition,
    radix::unravel,
    sections::{DimSpec, Factor, Pad, PartSpec},
    uneven::Uneven,
};
use proptest::prelude::*;

fn mesh(size: i64) -> Arc<Mesh> {
    Arc::new(Mesh::new(&["tp"], &[size]).unwrap())
}

fn part<'a>(factors: &[i64], cut: Option<usize>, axes: &[&'a str]) -> PartSpec<&'a str> {
    let factors = factors.iter().map(|&size| Factor::Known(size)).collect();
    PartSpec { factors, cut, axes: axes.to_vec(), uneven: None, at_most: None, split: false, unit: None, pad: None }
}

fn packed(mesh: Arc<Mesh>, parts: Vec<PartSpec<&str>>, n: i64, rule: Uneven) -> Result<Packed> {
    Packed::new(Arc::new(Layout::packed(mesh, &[DimSpec::Parts(parts)], &[])?), &[n], rule)
}

fn rows(packed: &Packed, device: i64) -> Vec<(i64, i64)> {
    packed.intervals(device).unwrap()[0].iter().map(|piece| (piece.start, piece.stop)).collect()
}

#[test]
fn the_numbers_of_the_design() {
    let even = |size, parts, n, device| rows(&packed(mesh(size), parts, n, Uneven::Even).unwrap(), device);
    let qkv = |heads, groups, kv: &'static str| {
        let small = part(&[groups, 128], Some(0), std::slice::from_ref(Box::leak(Box::new(kv))));
        vec![part(&[heads, 128], Some(0), &["tp"]), small.clone(), small]
    };
    assert_eq!(even(8, qkv(64, 8, "tp"), 10240, 3), [(3072, 4096), (8576, 8704), (9600, 9728)]);
    assert_eq!(even(16, qkv(64, 8, "tp:(1)8"), 10240, 5), [(2560, 3072), (8448, 8576), (9472, 9600)]);
    assert_eq!(even(8, qkv(32, 4, "tp:(1)4"), 5120, 5), [(2560, 3072), (4352, 4480), (4864, 4992)]);
    let half = part(&[14336], Some(0), &["tp"]);
    assert_eq!(even(8, vec![half.clone(), half], 28672, 1), [(1792, 3584), (16128, 17920)]);
    let c_attn = part(&[3, 12, 64], Some(1), &["tp"]);
    assert_eq!(even(4, vec![c_attn], 2304, 1), [(192, 384), (960, 1152), (1728, 1920)]);
    assert_eq!(even(4, vec![part(&[3, 4, 2], Some(1), &["tp"])], 24, 1), [(2, 4), (10, 12), (18, 20)]);
    let ten = packed(mesh(4), vec![part(&[10], Some(0), &["tp"])], 10, Uneven::Floor).unwrap();
    let lengths: Vec<i64> = (0..4).map(|device| ten.array_shape(device).unwrap()[0]).collect();
    assert_eq!(lengths, [2, 3, 2, 3]);
}

#[test]
fn a_vocabulary_is_padded() {
    // 50257 words of Megatron on 4 ranks: 51200 / 4 rows on each is for tp 8; for tp 4 they are 50688 / 4.
    let mut vocabulary = part(&[50257], Some(0), &["tp"]);
    vocabulary.pad = Some(Pad { multiple: 128, each: true });
    let p = packed(mesh(4), vec![vocabulary.clone()], 50257, Uneven::Even).unwrap();
    assert_eq!((p.array_shape(0).unwrap(), p.array_shape(3).unwrap()), (vec![12672], vec![12672]));
    assert_eq!(rows(&p, 3), [(38016, 50257)]);
    assert_eq!(p.locate_one(50256), Ok((3, 50256 - 38016)));
    assert_eq!(p.global_offset_one(3, 12671), Err(Error::Padding { position: None, shard: 3, local: 12671 }));
    let bad = p.global_offset_into(&[0, 3], &[5, 12671], &mut [0; 2], &mut never).unwrap_err();
    assert_eq!(bad, Error::Padding { position: Some(1), shard: 3, local: 12671 });
    vocabulary.pad = Some(Pad { multiple: 3, each: false });
    let refused = packed(mesh(4), vec![vocabulary], 50257, Uneven::Even).unwrap_err();
    assert_eq!(refused.to_string(), "axes[0], part 0 is 50259 when padded, which 4 shards do not divide evenly");
}

#[test]
fn a_holder_of_one_piece_has_a_box() {
    let boxes = |parts: Vec<PartSpec<&str>>, n| {
        let p = packed(mesh(4), parts, n, Uneven::Ceil).unwrap();
        let mut all = vec![-1; 8];
        let done = p.boxes_into(&mut all, &mut never).map(|()| all);
        let each: Result<Vec<_>> = (0..4).map(|device| Ok(p.box_of(device)?[0])).collect();
        let flat = each.map(|each| each.into_iter().flat_map(|(start, stop)| [start, stop]).collect());
        assert_eq!(done, flat);
        done
    };
    // Six in four at most two each, so that nothing is left for the last.
    assert_eq!(boxes(vec![part(&[6], Some(0), &["tp"])], 6), Ok(vec![0, 2, 2, 4, 4, 6, 6, 6]));
    let half = part(&[8], Some(0), &["tp"]);
    assert_eq!(boxes(vec![half.clone(), half.clone()], 16), Err(Error::ManyPieces { device: 0, count: 2 }));
    let p = packed(mesh(4), vec![half], 8, Uneven::Even).unwrap();
    assert!(matches!(p.boxes_into(&mut [0; 6], &mut never), Err(Error::Length { .. })));
}

#[test]
fn sizes_may_be_left_to_the_shape() {
    let free = |ratio| PartSpec { factors: vec![Factor::Free(ratio)], ..part(&[], Some(0), &["tp"]) };
    assert_eq!(rows(&packed(mesh(2), vec![free(1), free(1)], 12, Uneven::Even).unwrap(), 1), [(3, 6), (9, 12)]);
    assert_eq!(rows(&packed(mesh(2), vec![free(2), free(1)], 12, Uneven::Even).unwrap(), 1), [(4, 8), (10, 12)]);
    let refused = packed(mesh(2), vec![free(2), free(1)], 13, Uneven::Even).unwrap_err();
    assert!(refused.to_string().contains("dim 0 has 13 elements"), "{refused}");
}

#[test]
fn what_cannot_be_is_refused() {
    let error = |parts: Vec<PartSpec<&str>>, n| packed(mesh(8), parts, n, Uneven::Even).unwrap_err().to_string();
    assert_eq!(error(vec![part(&[4], Some(0), &["tp"])], 5), "dim 0 has 5 elements, but its parts add up to 4");
    assert_eq!(error(vec![], 5), "axes[0] is packed from 0 parts; a packed dim has 1 to 65536");
    assert!(error(vec![part(&[1], None, &[]); 70_000], 70_000).contains("packed from 70000 parts"));
    assert_eq!(
        error(vec![part(&[4, 3], Some(0), &["tp"])], 12),
        "dim 0, part 0: the factor that is cut is 4, which 8 shards do not divide evenly"
    );
    assert!(error(vec![part(&[4, 3], Some(2), &["tp"])], 12).contains("cuts factor 2"));
    assert!(error(vec![part(&[4], None, &["tp"])], 4).contains("cuts no factor"));
    assert!(error(vec![part(&[-4], None, &[])], 4).contains("is -4"));
    assert!(error(vec![part(&[i64::MAX, 2], None, &[])], 4).contains("over the limit"));
    assert!(error(vec![part(&[i64::MAX], None, &[]), part(&[2], None, &[])], 4).contains("over the limit"));
    assert!(error(vec![part(&[8], Some(0), &["tp", "tp:(1)2"])], 8).contains("overlaps"));
    let six = PartSpec { at_most: Some(6), ..part(&[6], Some(0), &["tp"]) };
    assert!(error(vec![six], 6).contains("neither divides the other"));
    let sum =
        Layout::packed(mesh(8), &[DimSpec::Parts(vec![part(&[8], Some(0), &["tp"])]), DimSpec::Axes(vec!["tp"])], &[]);
    assert!(sum.unwrap_err().to_string().contains("axes[1] uses axis \"tp\", which axes[0], part 0 uses already"));
}

#[test]
fn few_heads_are_replicated() {
    let kv = PartSpec { at_most: Some(4), ..part(&[4, 2], Some(0), &["tp"]) };
    let p = packed(mesh(8), vec![part(&[8], Some(0), &["tp"]), kv.clone()], 16, Uneven::Even).unwrap();
    assert_eq!(rows(&p, 5), [(5, 6), (12, 14)]);
    assert_eq!(p.locate_one(12), Ok((4, 1))); // devices 4 and 5 hold it, and 4 is the first
    let two = packed(mesh(2), vec![part(&[8], Some(0), &["tp"]), kv], 16, Uneven::Even).unwrap();
    assert_eq!(rows(&two, 1), [(4, 8), (12, 16)]);
}

#[test]
fn few_units_are_split() {
    // Two query groups, [q q k v] each, on one to eight ranks, as Megatron-Core cuts raw rows; three of them are refused.
    let groups = || PartSpec { split: true, ..part(&[2, 4], Some(0), &["tp"]) };
    let cut = |size| packed(mesh(size), vec![groups()], 8, Uneven::Even);
    assert_eq!(rows(&cut(1).unwrap(), 0), [(0, 8)]);
    assert_eq!(rows(&cut(2).unwrap(), 1), [(4, 8)]);
    assert_eq!(rows(&cut(4).unwrap(), 1), [(2, 4)]);
    assert_eq!(rows(&cut(8).unwrap(), 5), [(5, 6)]);
    assert_eq!(cut(4).unwrap().locate_one(5), Ok((2, 1)));
    assert!(cut(3).unwrap_err().to_string().contains("is 2, which 3 shards"));
    assert!(cut(16).unwrap_err().to_string().contains("is 8, which 16 shards"));
    let padded = PartSpec { pad: Some(Pad { multiple: 2, each: false }), ..groups() };
    assert!(packed(mesh(4), vec![padded], 8, Uneven::Even).unwrap_err().to_string().contains("cannot be split"));
}

#[test]
fn units_stay_together() {
    let of = |n, unit, devices, rule, pad| {
        let one = PartSpec { unit: Some(unit), pad, ..part(&[n], Some(0), &["tp"]) };
        packed(mesh(devices), vec![one], n, rule)
    };
    let lengths = |n, unit, devices, rule| -> Vec<i64> {
        let p = of(n, unit, devices, rule, None).unwrap();
        (0..devices).map(|device| p.array_shape(device).unwrap()[0]).collect()
    };
    // gpt-oss: 2,880 in units of 32 over 4; 576 = 4.5 blocks of 128.
    assert_eq!(lengths(2880, 32, 4, Uneven::Ceil), [736, 736, 736, 672]);
    assert_eq!(lengths(2880, 32, 4, Uneven::Balanced), [736, 736, 704, 704]);
    assert_eq!(lengths(576, 128, 4, Uneven::Ceil), [256, 256, 64, 0]);
    assert_eq!(lengths(576, 128, 4, Uneven::Floor), [128, 128, 128, 192]);
    assert_eq!(lengths(576, 128, 5, Uneven::Even), [128, 128, 128, 128, 64]);
    assert_eq!(lengths(192, 128, 1, Uneven::Even), [192]);
    assert_eq!(lengths(5, i64::MAX, 3, Uneven::Ceil), [5, 0, 0]);
    assert_eq!(lengths(i64::MAX, i64::MAX - 1, 2, Uneven::Even), [i64::MAX - 1, 1]);
    let p = of(576, 128, 4, Uneven::Floor, None).unwrap();
    assert_eq!((p.largest_shape(), p.locate_one(575)), (vec![192], Ok((3, 191))));
    let refused = |unit, pad| of(320, unit, 2, Uneven::Even, pad).unwrap_err().to_string();
    assert_eq!(
        refused(128, None),
        "dim 0, part 0: the factor that is cut is 320, that is 3 units of 128, which 2 shards do not divide evenly"
    );
    assert!(refused(0, None).contains("has a unit of 0"));
    // Padded, every shard must be whole units.
    let each = Some(Pad { multiple: 128, each: true });
    assert_eq!(of(320, 128, 2, Uneven::Even, each).unwrap().array_shape(1), Ok(vec![256]));
    assert_eq!(rows(&of(320, 128, 2, Uneven::Even, each).unwrap(), 1), [(256, 320)]);
    assert_eq!(
        refused(128, Some(Pad { multiple: 64, each: true })),
        "axes[0], part 0 is 384 when padded, of which each of 2 shards has 192: not a multiple of 128"
    );
    let split = PartSpec { unit: Some(2), split: true, ..part(&[2, 4], Some(0), &["tp"]) };
    assert!(packed(mesh(4), vec![split], 8, Uneven::Even).unwrap_err().to_string().contains("is to be split"));
    assert!(packed(mesh(4), vec![PartSpec { unit: Some(2), ..part(&[8], None, &[]) }], 8, Uneven::Even).is_err());
}

#[test]
fn many_parts_are_found_fast_and_large_ones_do_not_wrap() {
    let parts: Vec<_> = (0..60_000).map(|i| part(&[2 + i % 2 * 2], Some(0), &["tp"])).collect();
    let p = packed(mesh(2), parts, 180_000, Uneven::Even).unwrap();
    assert_eq!(p.count(0), Ok(60_000));
    assert_eq!(p.locate_one(179_999), Ok((1, 89_999)));
    assert_eq!(p.global_offset_one(1, 89_999), Ok(179_999));
    let n = i64::MAX - 1;
    let halves =
        packed(mesh(2), vec![part(&[n / 2], Some(0), &["tp"]), part(&[n - n / 2], None, &[])], n, Uneven::Ceil);
    let halves = halves.unwrap();
    let (shard, local) = halves.locate_one(n - 1).unwrap();
    assert_eq!(halves.global_offset_one(shard, local), Ok(n - 1));
    assert_eq!(halves.array_shape(0).unwrap(), [n / 2 / 2 + n / 2 % 2 + (n - n / 2)]);
}

/// Factors, which of them is cut, by which axes, under which rule, in which units, padded by what.
type AnyPart = (Vec<i64>, Option<usize>, Vec<&'static str>, Option<Uneven>, i64, Option<Pad>);

/// Parts of up to four factors, cut by any of the axes `a` and `b` or their factors, or not.
fn any_part() -> impl Strategy<Value = AnyPart> {
    let axes = prop::sample::select(vec![
        vec!["a"],
        vec!["b"],
        vec!["a", "b"],
        vec!["b", "a"],
        vec!["a:(1)2"],
        vec!["a:(2)2", "b"],
        vec!["a:(2)2", "a:(1)2"],
    ]);
    let rule = prop::option::of(prop::sample::select(&Uneven::ALL[1..]));
    let pad = prop::option::weighted(0.2, (1..4_i64).prop_map(|multiple| Pad { multiple, each: true }));
    let unit = prop_oneof![Just(1), 1..8_i64];
    let factors = prop::collection::vec(0..5_i64, 1..4);
    (factors, prop::option::weighted(0.8, 0..3_usize), axes, rule, unit, pad, 1..7_i64).prop_map(
        |(mut factors, cut, axes, rule, unit, pad, more)| match cut {
            Some(cut) => {
                let cut = cut % factors.len();
                factors[cut] *= more; // So that there are several units.
                let pad = pad.map(|pad| Pad { multiple: pad.multiple * unit, ..pad });
                (factors, Some(cut), axes, rule, unit, pad)
            }
            None => (factors, None, vec![], None, 1, None),
        },
    )
}

/// The positions that a device holds of one part that begins at 0, and the length of its array.
fn by_hand(
    device: &[i64; 2],
    factors: &[i64],
    cut: Option<usize>,
    axes: &[&str],
    rule: Uneven,
    (unit, pad): (i64, Option<Pad>),
) -> (Vec<Option<i64>>, i64) {
    let whole: i64 = factors.iter().product();
    let Some(cut) = cut else { return ((0..whole).map(Some).collect(), whole) };
    let [a, b] = *device;
    let named = |name: &str| match name {
        "a" => (a, 4),
        "a:(1)2" => (a / 2, 2),
        "a:(2)2" => (a % 2, 2),
        _ => (b, 3),
    };
    let (shard, sizes) = axes.iter().map(|name| named(name)).fold((0, vec![]), |(shard, mut sizes), (i, size)| {
        sizes.push(size);
        (shard * size + i, sizes)
    });
    let (n, k): (i64, i64) = (factors[cut], sizes.iter().product());
    let (units, room): (Vec<i64>, i64) = match pad {
        Some(pad) => {
            let step = (0..).map(|i| i * pad.multiple).find(|step| step * k >= n).unwrap();
            ((0..n).filter(|at| at / step.max(1) == shard).collect(), step)
        }
        None => {
            let line: Vec<String> = (0..sizes.len()).map(|i| format!("x{i}")).collect();
            let mesh = Arc::new(Mesh::new(&line, &sizes).unwrap());
            let layout = Arc::new(Layout::new(mesh, std::slice::from_ref(&line), &[]).unwrap());
            let count = (0..n).step_by(unit as usize).count() as i64;
            let (start, stop) = Partition::new(layout, &[count], rule).unwrap().box_of(shard).unwrap()[0];
            let held: Vec<i64> = (0..n).filter(|at| (start..stop).contains(&(at / unit))).collect();
            (held.clone(), held.len() as i64)
        }
    };
    let (outer, inner): (i64, i64) = (factors[..cut].iter().product(), factors[cut + 1..].iter().product());
    let mut held = Vec::new();
    for o in 0..outer {
        for u in 0..room {
            let at = units.get(u as usize);
            held.extend((0..inner).map(|i| at.map(|at| (o * n + at) * inner + i)));
        }
    }
    let length = held.len() as i64;
    (held, length)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn everything_is_as_the_rule_says(
        parts in prop::collection::vec(any_part(), 1..4),
        rule in prop::sample::select(&Uneven::ALL[1..]),
        width in 0..4_i64,
        plain_first in any::<bool>(),
    ) {
        let mesh = Arc::new(Mesh::new(&["a", "b", "c"], &[4, 3, 2]).unwrap());
        let specs: Vec<_> = parts
            .iter()
            .map(|(factors, cut, axes, uneven, unit, pad)| {
                let unit = (*unit > 1).then_some(*unit);
                PartSpec { uneven: *uneven, unit, pad: *pad, ..part(factors, *cut, axes) }
            })
            .collect();
        let n: i64 = parts.iter().map(|part| part.0.iter().product::<i64>()).sum();
        let (mut dims, mut shape) = (vec![DimSpec::Parts(specs), DimSpec::Axes(vec!["c"])], vec![n, width]);
        if plain_first {
            dims.reverse();
            shape.reverse();
        }
        let layout = Arc::new(Layout::packed(mesh.clone(), &dims, &[]).unwrap());
        let p = Packed::new(layout, &shape, rule).unwrap();
        let columns = Partition::new(
            Arc::new(Layout::new(mesh.clone(), &[["c"]], &[]).unwrap()), &[width], rule).unwrap();
        let mut first = vec![None; p.size() as usize];
        let mut all_rows = vec![0; {
            let mut begins = vec![0; 25];
            p.begins_into(&mut begins, &mut never).unwrap();
            *begins.last().unwrap() as usize * 6
        }];
        p.pieces_into(&mut all_rows, 3, &mut never).unwrap();
        let mut listed = all_rows.chunks_exact(6);
        let mut elements = vec![0; 24];
        p.elements_into(&mut elements, &mut never).unwrap();
        for device in 0..24 {
            let coordinate = mesh.coordinate(device).unwrap();
            let (mut held, mut base) = (Vec::new(), 0);
            for (factors, cut, axes, uneven, unit, pad) in &parts {
                let (extras, rule) = ((*unit, *pad), uneven.unwrap_or(rule));
                let (some, _) = by_hand(&[coordinate[0], coordinate[1]], factors, *cut, axes, rule, extras);
                held.extend(some.into_iter().map(|at| at.map(|at| at + base)));
                base += factors.iter().product::<i64>();
            }
            let (from, to) = columns.box_of(device).unwrap()[0];
            let across: Vec<Option<i64>> = (from..to).map(Some).collect();
            let axes = if plain_first { [&across, &held] } else { [&held, &across] };
            let array = p.array_shape(device).unwrap();
            prop_assert_eq!(&array, &[axes[0].len() as i64, axes[1].len() as i64]);
            prop_assert_eq!(elements[device as usize], array[0] * array[1]);
            let shard = p.layout().shard_id(device).unwrap();
            // Element by element: what is where in the device's array.
            let mut offsets = Vec::new();
            for local in 0..array[0] * array[1] {
                let at = unravel(local, &array);
                let here = axes[0][at[0] as usize].zip(axes[1][at[1] as usize]);
                let offset = here.map(|(row, column)| row * shape[1] + column);
                prop_assert_eq!(p.global_offset_one(shard, local).ok(), offset);
                if let Some(offset) = offset {
                    offsets.push(offset);
                    let best = first[offset as usize].get_or_insert((shard, local));
                    *best = (*best).min((shard, local));
                }
            }
            // The pieces show the same elements at the same places.
            let mut shown = vec![None; (array[0] * array[1]) as usize];
            let count = p.count(device).unwrap();
            for row in listed.by_ref().take(count as usize) {
                for i in row[0]..row[1] {
                    for j in row[3]..row[4] {
                        let local = (row[2] + i - row[0]) * array[1] + row[5] + j - row[3];
                        prop_assert_eq!(shown[local as usize].replace(i * shape[1] + j), None);
                    }
                }
            }
            let expected: Vec<Option<i64>> = (0..shown.len())
                .map(|local| p.global_offset_one(shard, local as i64).ok())
                .collect();
            prop_assert_eq!(shown, expected);
            // Runs, as long as they can be.
            offsets.sort_unstable();
            let mut by_hand: Vec<(i64, i64)> = Vec::new();
            for offset in offsets {
                match by_hand.last_mut() {
                    Some((start, length)) if *start + *length == offset => *length += 1,
                    _ => by_hand.push((offset, 1)),
                }
            }
            let runs = PackedRuns::of(&p, device).unwrap();
            let mut out = vec![0; 2 * runs.count() as usize];
            runs.fill_into(&mut out, &mut never).unwrap();
            prop_assert_eq!(out.chunks(2).map(|run| (run[0], run[1])).collect::<Vec<_>>(), by_hand);
        }
        prop_assert!(listed.next().is_none());
        // Every element is somewhere, and its canonical place is that of the smallest shard id.
        let offsets: Vec<i64> = (0..p.size()).collect();
        let (mut shards, mut locals) = (vec![0; offsets.len()], vec![0; offsets.len()]);
        p.locate_into(&offsets, &mut shards, &mut locals, &mut never).unwrap();
        for (i, &offset) in offsets.iter().enumerate() {
            prop_assert_eq!(Some((shards[i], locals[i])), first[i]);
            prop_assert_eq!(p.locate_one(offset), Ok((shards[i], locals[i])));
        }
        let mut back = vec![0; offsets.len()];
        p.global_offset_into(&shards, &locals, &mut back, &mut never).unwrap();
        prop_assert_eq!(back, offsets);
        let largest: Vec<i64> = (0..2)
            .map(|dim| (0..24).map(|device| p.array_shape(device).unwrap()[dim]).max().unwrap())
            .collect();
        prop_assert_eq!(p.largest_shape(), largest);
    }
}
