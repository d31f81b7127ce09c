module perfusion.dev/tests/checkvalid

go 1.22

require github.com/google/pprof v0.0.0-20240727154555-813a5fbdbec8
