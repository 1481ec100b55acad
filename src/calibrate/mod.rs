//! From recorded requests to a calibration: idf weights, layer mask, one centroid a decode worker.
//!
//! Pure: never reads a file or runs a model.
