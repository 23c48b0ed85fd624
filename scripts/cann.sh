# Finds CANN for the scripts that source this, where cann_places.txt says, which doctor/facts.py reads too.

# Prints the folder of CANN; fails where there is none
cann_home() {
    local place
    for place in "${ASCEND_TOOLKIT_HOME:-}" "${ASCEND_HOME_PATH:-}"; do
        if [[ -n $place && -d $place ]]; then
            echo "$place"
            return
        fi
    done
    while read -r place; do
        case $place in
        '' | '#'*) continue ;;
        ASCEND/*) place=${ASCEND:-/usr/local/Ascend}/${place#ASCEND/} ;;
        '~/'*) place=$HOME/${place#'~/'} ;;
        esac
        if [[ -d $place && (-f $place/set_env.sh || -f ${place%/latest}/set_env.sh) ]]; then
            echo "$place"
            return
        fi
    done <scripts/cann_places.txt
    return 1
}
